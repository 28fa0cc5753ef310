import json

import pytest

from verl_bridge.cli import main
from verl_bridge.evaluation.bench_retrieval import Published, judge, same_documents, synthetic_corpus
from verl_bridge.evaluation.load import Answer, Load
from verl_bridge.retrieval.corpus import Corpus

BEST, SCORES = ["a", "b", "c", "d"], [0.9, 0.8, 0.7995, 0.5]


@pytest.mark.parametrize(
    ("ids", "same"),
    [
        (["a", "b", "c"], True),
        (["a", "c", "b"], True),  # 5e-4 apart
        (["a", "c"], True),
        (["b", "a", "c"], False),
        (["a", "b", "d"], False),
        (["a", "b", "x"], False),  # unknown to the direct search
        (["a", "b", "b"], False),
    ],
)
def test_documents_within_a_tie_may_change_places_and_no_others(ids, same):
    assert same_documents(ids, BEST, SCORES) is same


def test_answers_under_changing_adapters_are_judged_by_the_version_they_name():
    expected = {0: [(("a", "b", "c"), (0.9, 0.8, 0.7))] * 2, 1: [(("c", "b", "a"), (0.9, 0.8, 0.7))] * 2}

    def answer(ids, version, start, end, status=200):
        body = json.dumps({"results": [{"ids": ids, "adapter_version": version}]}).encode()
        return Answer(0, status, start, end, body if status == 200 else b"")

    answers = [
        answer(["a", "b"], 0, 0.0, 1.0),
        answer(["a", "b"], 0, 2.5, 4.0),  # asked before version 1 was acknowledged
        answer(["c", "b"], 1, 2.5, 4.5),
        answer(["a", "b"], 1, 3.5, 5.0),  # names a version whose documents these are not
        answer(["a", "b"], 0, 3.5, 6.0),  # the old version after the acknowledgement
        answer([], 0, 3.5, 6.0, status=503),
    ]
    found = judge(Load(6.0, answers), [Published(1, 2.0, 3.0)], expected, tie=1e-3)
    assert (found["mixed"], found["stale"], found["failed"], found["served"]) == (1, 1, 1, 1)
    assert found["answers_that_tell_versions_apart"] == 1.0
    assert (found["slowest_publish_s"], found["slowest_first_answer_s"]) == (1.0, 2.5)


def test_the_synthetic_corpus_is_as_large_as_asked_and_on_real_cities(tmp_path):
    synthetic_corpus(tmp_path / "c.jsonl", 500)
    corpus = Corpus.open(tmp_path / "c.jsonl")
    assert len(corpus) == 500 and len({document.contents for document in corpus}) == 500
    assert corpus[0].title.startswith('"') and corpus[0].title.strip('"') in corpus[0].text
    with pytest.raises(ValueError, match="the largest corpus that can be made"):
        synthetic_corpus(tmp_path / "d.jsonl", 10**7)


def test_the_whole_benchmark_small(tmp_path, capsys):
    """A real server, swaps under load, a soak: every answer right, none failed, none mixed."""
    code = main(
        [
            *("bench", "retrieval", "--json", "--documents", "300", "--requests", "256", "--clients", "8"),
            *("--soak", "200", "--work", str(tmp_path), "--compute-dtype", "float32", "--threads", "1"),
        ]
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert report["documents"] == 300 and report["clients"] == 8 and report["compute_dtype"] == "float32"
    assert report["identical"] == 1.0 and report["failed"] == 0 and report["largest_score_difference"] < 1e-4
    assert set(report["by_clients"]) == {"1", "16", "8", "256"}
    swap = report["swap"]
    assert (swap["published"], swap["served"]) == (5, 5)
    assert (swap["failed"], swap["mixed"], swap["stale"]) == (0, 0, 0)
    assert swap["answers_that_tell_versions_apart"] > 0.2 and swap["slowest_first_answer_s"] < 10
    assert report["soak"]["failed"] == 0 and report["soak"]["mb_before"] > 50
    assert report["soak"]["rss_mb_before"] > report["soak"]["mb_before"]  # mapped files count there
    for key in ("requests_per_second", "p95_ms", "encoder_limit", "search_limit", "faiss_flat_limit"):
        assert report[key] > 0
    again = json.loads((tmp_path / "index-cities-300" / "manifest.json").read_text())
    assert again["documents"] == 300  # kept for the next run
