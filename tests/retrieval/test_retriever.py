import pytest
import torch

from verl_bridge.retrieval.index import DocumentIndex
from verl_bridge.retrieval.retriever import Retriever, search_text


@pytest.fixture
def retriever(encoders, places, places_index_folder):
    queries, _ = encoders
    return Retriever(places, DocumentIndex.load(places_index_folder, places, queries), queries, top_k=4)


def test_answers_are_in_order_scored_by_inner_product_and_stamped(retriever):
    found = retriever.search(["a town called Borsk", "money of Gorvia", "a town called Borsk"])
    assert [answer.ids[0] for answer in found] == ["Borsk-town", "Gorvia-money", "Borsk-town"]
    assert found[0] == found[2]
    for query, answer in zip(["a town called Borsk", "money of Gorvia"], found, strict=False):
        assert answer.status == "ok" and answer.error is None and answer.adapter_version == 0
        assert tuple(d.id for d in answer.documents) == answer.ids and len(answer.ids) == 4
        vectors = retriever.index.vectors(answer.ids)
        expected = (vectors @ retriever.encoder.encode_queries([query])[0]).tolist()
        assert answer.scores == pytest.approx(expected, abs=1e-5)
        assert list(answer.scores) == sorted(answer.scores, reverse=True)
    assert len(retriever.search(["x"], top_k=1)[0].ids) == 1
    assert len(retriever.search(["x"], top_k=99)[0].ids) == 16


def test_a_blank_query_is_an_error_and_not_an_empty_answer(retriever):
    blank, fine, tab = retriever.search(["", "Caldra", " \t\n"])
    assert blank.status == tab.status == "error" and blank.error == "the query is empty" and blank.ids == ()
    assert fine.status == "ok" and fine.to_dict()["documents"][0]["title"] == "Caldra"
    assert blank.to_dict()["status"] == "error" and blank.to_dict()["adapter_version"] == 0
    assert retriever.search([]) == []


def test_what_is_served_changes_with_the_adapter_and_says_so(retriever, tmp_path):
    before = retriever.search(["money of Hollin"])[0]
    state = retriever.encoder.adapter_state()
    generator = torch.Generator().manual_seed(0)
    moved = {n: v + 0.05 * torch.randn(v.shape, generator=generator) for n, v in state.items()}
    retriever.encoder.set_adapter_state(moved, 1)
    after = retriever.search(["money of Hollin"])[0]
    assert (before.adapter_version, after.adapter_version, retriever.version) == (0, 1, 1)
    assert max(abs(a - b) for a, b in zip(before.scores, after.scores, strict=True)) > 1e-3
    retriever.encoder.save_adapter(tmp_path / "a")
    retriever.encoder.set_adapter_state(state, 2)
    again = retriever.search(["money of Hollin"])[0]
    assert again.ids == before.ids and again.scores == pytest.approx(before.scores, abs=1e-6)
    retriever.load_adapter(tmp_path / "a", 3)
    swapped = retriever.search(["money of Hollin"])[0]
    assert swapped.adapter_version == 3 and swapped.scores == pytest.approx(after.scores, abs=1e-6)


def test_parts_that_do_not_belong_together_are_refused(retriever, places):
    with pytest.raises(ValueError, match=r"top_k is 0"):
        Retriever(places, retriever.index, retriever.encoder, top_k=0)

    class Narrow:
        dim = 5

    with pytest.raises(ValueError, match="dimension 384 but the encoder 5"):
        Retriever(places, retriever.index, Narrow())
    with pytest.raises(ValueError, match="16 documents but the corpus 3"):
        Retriever([1, 2, 3], retriever.index, retriever.encoder)


def test_an_adapter_that_diverged_raises(retriever):
    state = retriever.encoder.adapter_state()
    retriever.encoder.set_adapter_state({name: value * float("nan") for name, value in state.items()}, 1)
    with pytest.raises(ValueError, match="not finite"):
        retriever.search(["money"])


@pytest.mark.parametrize("top_k", [True, 2.0, "2", 0, -1])
def test_a_top_k_that_is_no_count_is_refused(retriever, top_k):
    with pytest.raises(ValueError, match="top_k is"):
        retriever.search(["x"], top_k)


@pytest.mark.parametrize("queries", ["Borsk", None, 3, [None], ["x", 3], [True]])
def test_queries_that_are_no_list_of_strings_are_refused(retriever, queries):
    with pytest.raises(ValueError, match="give a list of strings"):
        retriever.search(queries)


def test_half_a_surrogate_pair_in_a_query_is_replaced(retriever):
    broken, clean = retriever.search(["money of Hollin \ud83d", "money of Hollin ?"])
    assert broken == clean and broken.ids[0] == "Hollin-money"


def test_the_text_that_is_searched_for():
    assert search_text("capital", "Where?", "query") == "capital"
    assert search_text("capital", "Where?", "question_query") == "Where? capital"
    assert search_text(" ", "Where?", "question_query") == " "  # still refused as empty
