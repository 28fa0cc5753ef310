import pytest

from verl_bridge.retrieval.encoder import BaseEncoder, DocumentEncoder, QueryEncoder, load_encoders
from verl_bridge.retrieval.families import FAMILIES, get_family


def test_the_conventions_of_the_model_cards():
    assert (FAMILIES["e5"].query_prefix, FAMILIES["e5"].passage_prefix) == ("query: ", "passage: ")
    assert FAMILIES["bge"].query_prefix == "Represent this sentence for searching relevant passages: "
    assert FAMILIES["bge"].pooling == "cls"
    for name in ("gte", "minilm", "contriever"):
        assert (FAMILIES[name].query_prefix, FAMILIES[name].passage_prefix) == ("", "")
    assert {name for name, family in FAMILIES.items() if not family.normalize} == {"contriever"}
    assert get_family(None) is None
    with pytest.raises(ValueError, match="'E5' is unknown; use one of e5, bge"):
        get_family("E5")


def test_a_family_sets_prefixes_and_pooling_and_an_explicit_value_wins(minilm):
    queries, documents = load_encoders(minilm, family="bge")
    assert queries.describe()["query_prefix"] == FAMILIES["bge"].query_prefix
    assert documents.describe()["family"] == "bge" and documents.describe()["pooling"] == "cls"
    queries, documents = load_encoders(minilm, family="e5", query_prefix="", passage_prefix="p: ", pooling="cls")
    assert (queries.query_prefix, documents.passage_prefix, documents.base.pooling) == ("", "p: ", "cls")


def test_the_string_that_is_encoded_is_prefix_plus_text_in_serving_and_in_training(minilm, monkeypatch):
    from verl_bridge.retrieval.serving import ServingEncoder

    queries, documents = load_encoders(minilm, family="e5")
    serving, seen = ServingEncoder(queries, "float32"), []
    preprocess = queries.base.model.preprocess
    monkeypatch.setattr(queries.base.model, "preprocess", lambda texts: seen.extend(texts) or preprocess(texts))
    text = "who  wrote\tÉmile? "
    queries.encode_queries([text])
    queries.encode_queries([text], training=True)
    serving.encode_queries([text])
    documents.encode_documents([text])
    assert [s.encode() for s in seen] == [f"query: {text}".encode()] * 3 + [f"passage: {text}".encode()]


def test_pooling_is_really_changed_and_bad_settings_are_refused(minilm):
    import torch

    mean, cls = (DocumentEncoder(BaseEncoder(minilm, pooling=pooling)) for pooling in ("mean", "cls"))
    a, b = (encoder.encode_documents(["a town near a lake"]) for encoder in (mean, cls))
    assert torch.nn.functional.cosine_similarity(a, b).item() < 0.9
    features = cls.base.model.preprocess(["a town near a lake"])
    with torch.no_grad():
        first = cls.base.model[0](features)["token_embeddings"][:, 0]
    torch.testing.assert_close(b, torch.nn.functional.normalize(first, dim=-1), atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="pooling 'max' cannot be set"):
        BaseEncoder(minilm, pooling="max")
    with pytest.raises(ValueError, match="normalises by itself"):
        BaseEncoder(minilm, normalize=False)
    with pytest.raises(ValueError, match="family 'e6' is unknown"):
        QueryEncoder(BaseEncoder(minilm), family="e6")


def test_a_family_beats_what_the_index_was_made_with_and_what_does_not_fit_is_refused(
    minilm, places, places_file, tmp_path
):
    from verl_bridge.retrieval.index import DocumentIndex
    from verl_bridge.retrieval.retriever import open_retriever

    _, documents = load_encoders(minilm, passage_prefix="passage: ")
    DocumentIndex.build(places, documents, tmp_path / "i")
    files = {"corpus": places_file, "index": tmp_path / "i"}
    assert open_retriever(**files).encoder.queries.query_prefix == ""
    assert open_retriever(**files, family="e5").encoder.queries.query_prefix == "query: "
    assert open_retriever(**files, family="e5", query_prefix="q: ").encoder.queries.query_prefix == "q: "
    with pytest.raises(ValueError, match="passage_prefix 'passage: '"):
        open_retriever(**files, family="minilm")
    _, documents = load_encoders(minilm, family="e5")
    DocumentIndex.build(places, documents, tmp_path / "e5", query_prefix="query: ")
    with pytest.raises(ValueError, match="pooling 'mean'"):
        open_retriever(corpus=places_file, index=tmp_path / "e5", family="bge")


def test_opened_for_its_vectors_alone(minilm, places_file, places_index_folder):
    from verl_bridge.retrieval.retriever import open_retriever

    full = open_retriever(corpus=places_file, index=places_index_folder)
    only = open_retriever(corpus=places_file, index=places_index_folder, searchable=False)
    (found,) = full.search(["money of Hollin"], 4)
    (scores,) = only.scores(["money of Hollin"], [found.ids])
    assert scores == pytest.approx(found.scores, abs=1e-5)
    with pytest.raises(RuntimeError, match="opened only for its vectors"):
        only.search(["money of Hollin"], 4)
    with pytest.raises(KeyError, match="nowhere"):
        only.scores(["x"], [["nowhere"]])
