"""The collapse watch: what it calls a collapse, what it does not, and that it is heard."""

import math

import pytest

from tests.bilevel.places import PLACES, batch_of, question
from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.watch import CollapseWatch

QUIET = {"entropy": 2.0, "candidates": 10, "drift": 0.5}


def test_a_share_far_below_the_first_is_a_collapse_and_agreeing_paraphrases_are_none():
    watch = CollapseWatch()
    assert watch.check(documents=96, queries=120, **QUIET) is None and watch.first_share == 0.8
    # eight paraphrases of every question that learn to agree on its evidence
    assert watch.check(documents=12, queries=120, **QUIET) is None
    # 128 queries, five documents
    assert "0.039 of the distinct queries, 0.800 at the first" in watch.check(documents=5, queries=128, **QUIET)
    assert watch.first_share == 0.8 and watch.first_documents == 96
    # a retriever that never told queries apart has not collapsed since
    frozen = CollapseWatch()
    assert [frozen.check(documents=1, queries=50, **QUIET) for _ in range(3)] == [None] * 3


def test_one_document_for_all_of_few_queries_is_a_collapse(fresh):
    """Where a batch is small, one document is never below a tenth of the first share: here 1/16 of 0.5."""
    watch = CollapseWatch()
    assert watch.check(documents=8, queries=16, **QUIET) is None
    assert "all 16 distinct queries have one top-1 document, 8 at the first" in watch.check(
        documents=1, queries=16, **QUIET
    )
    assert watch.check(documents=2, queries=16, **QUIET) is None
    assert watch.check(documents=1, queries=4, **QUIET) and watch.check(documents=1, queries=3, **QUIET) is None
    # through an updater, and what it is measured by survives a restart
    updater = fresh(lr=1e-30)
    assert updater.update(batch_of(PLACES[:6], neighbours=0)).metrics["bridge/distinct_top1_share"] == 1.0
    data = updater.state_bytes()
    for resumed in (updater, fresh(lr=1e-30)):
        resumed.load_state_bytes(data)
        assert resumed.watch.first_documents == 6
        assert resumed.update(one_document(1, queries=6)).metrics["bridge/collapsed"] == 1.0


def test_certainty_counts_only_with_a_large_drift():
    low = {"documents": 8, "queries": 10, "candidates": 10, "entropy": 0.019 * math.log(10)}
    assert CollapseWatch().check(**low, drift=0.05) is None
    assert "entropy is 0.0437 nats and the adapter has moved by 0.20" in CollapseWatch().check(**low, drift=0.2)
    assert CollapseWatch().check(**{**low, "entropy": 0.021 * math.log(10)}, drift=0.2) is None
    assert CollapseWatch().check(**{**low, "entropy": None}, drift=0.2) is None


def one_document(version, queries=24):
    """All queries have the song about one place on top."""
    hub = f"{PLACES[0]}-false"
    texts = [question(PLACES[0]) + "?" * n for n in range(queries)]
    ids = [[hub, f"{place}-true"] for place in PLACES[:queries]]
    return RetrieverBatch(texts, ids, [[-1.0, -2.0]] * queries, [1.0] * queries, [True] * queries, [version] * queries)


def test_an_update_on_a_collapsed_retriever_warns_once_and_says_so_until_it_recovers(fresh, caplog):
    updater = fresh(lr=1e-30)
    assert updater.update(batch_of(PLACES, neighbours=1)).metrics["bridge/collapsed"] == 0.0
    first = updater.watch.first_share
    assert first > 0.5
    for version in (1, 2):
        metrics = updater.update(one_document(version)).metrics
        assert metrics["bridge/distinct_top1_share"] == pytest.approx(1 / 24)
        assert metrics["bridge/collapsed"] == 1.0
    warnings = [r.getMessage() for r in caplog.records if "COLLAPSES" in r.getMessage()]
    assert len(warnings) == 1 and "verl_bridge.bridge.lr" in warnings[0]
    assert updater.update(batch_of(PLACES, version=3)).metrics["bridge/collapsed"] == 0.0
    # what it is measured by survives a restart
    data = updater.state_bytes()
    resumed = fresh(lr=1e-30)
    resumed.load_state_bytes(data)
    assert resumed.watch.first_share == first
    assert resumed.update(one_document(4)).metrics["bridge/collapsed"] == 1.0
