"""The second state follows G alone, as if it were alone, and the first one does not notice."""

import math

import pytest
import torch

from tests.bilevel.places import PLACES, batch_of, mixed_batch, probabilities, take, warm
from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.tensors import BatchTensors
from verl_bridge.bilevel.two_state import TwoStateUpdater
from verl_bridge.retrieval.encoder import QueryEncoder

SETTINGS = {"lr": 2e-3, "minibatch_size": 3, "epochs": 2, "seed": 4}


def with_version(batch, version):
    columns = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    return RetrieverBatch(**{**columns, "adapter_version": [version] * len(batch.queries)})


def softer(batch):
    columns = {name: getattr(batch, name) for name in batch.__dataclass_fields__}
    likelihood = [[value / 5 for value in row] for row in batch.answer_log_likelihood]
    return RetrieverBatch(**{**columns, "answer_log_likelihood": likelihood})


def batches():
    first, second = mixed_batch(), batch_of(PLACES[4:9], version=1, advantage=[1.0, -1.0, 0.5, 0.0, 2.0])
    return [first, second]


def same(one, two, tolerance=1e-6):
    return all((one[name] - two[name]).abs().max() <= tolerance for name in one)


@pytest.fixture
def alone(fresh):
    """What each objective makes of the batches by itself: the penalised result, and the RAG loss's."""

    def run(**settings):
        out = {}
        for objective in ("penalised", "rag"):
            updater = fresh(objective=objective, **settings)
            results = [updater.update(batch) for batch in batches()]
            out[objective] = updater.encoder.adapter_state(), results
        return out

    return run


@pytest.mark.parametrize("settings", [{"lr": 2e-3}, SETTINGS], ids=["one step", "minibatches"])
def test_each_state_moves_as_it_would_alone(fresh, alone, settings):
    expected = alone(**settings)
    both = fresh(TwoStateUpdater, **settings)
    results = [both.update(batch) for batch in batches()]
    assert same(both.encoder.adapter_state(), expected["penalised"][0])
    assert same(both.lower_state, expected["rag"][0])
    assert not same(both.encoder.adapter_state(), both.lower_state, 1e-4)  # the two can be told apart
    assert both.encoder.adapter_version == results[-1].version == 2
    names = ("bridge/loss", "bridge/loss_rl", "bridge/loss_rag", "bridge/grad_norm", "bridge/distinct_top1_share")
    for result, other in zip(results, expected["penalised"][1], strict=True):
        assert [result.metrics[n] for n in names] == pytest.approx([other.metrics[n] for n in names], abs=1e-5)
    lower = expected["rag"][1][0].metrics["bridge/loss_rag"]
    assert results[0].metrics["bridge/lower/loss_rag"] == pytest.approx(lower, abs=1e-5)


def posterior(encoder, index, batch, tau):
    """softmax_d(log p + ℓ/τ) by hand, turn by turn."""
    out = []
    for query, ids, values in zip(batch.queries, batch.candidate_ids, batch.answer_log_likelihood, strict=True):
        p = probabilities(encoder, index, query, ids)
        weights = [a * math.exp(value / tau) for a, value in zip(p, values, strict=True)]
        out.append([w / sum(weights) for w in weights])
    return out


@pytest.mark.parametrize("tau", [1.0, 2.5])
def test_the_evidence_shift_is_the_difference_of_the_posteriors_after_both_steps(fresh, index, tau):
    # a large step and likelihoods that leave open which document it is, so that the two states differ
    batch = softer(mixed_batch())
    updater = fresh(TwoStateUpdater, lr=1e-2, tau_likelihood=tau, max_staleness=1)
    result = updater.update(batch)
    assert [len(row) for row in result.evidence_shift] == [len(row) for row in batch.candidate_ids]
    encoder = updater.encoder
    first = posterior(encoder, index, batch, tau)
    serving = encoder.adapter_state()
    encoder.set_adapter_state(updater.lower_state, 1)
    second = posterior(encoder, index, batch, tau)
    encoder.set_adapter_state(serving, 1)
    largest = 0.0
    for row, one, two in zip(result.evidence_shift, first, second, strict=True):
        assert row == pytest.approx([a - b for a, b in zip(one, two, strict=True)], abs=1e-5)
        assert sum(row) == pytest.approx(0.0, abs=1e-6)
        largest = max(largest, *map(abs, row))
    assert largest > 1e-3
    size = sum(sum(map(abs, row)) for row in result.evidence_shift) / 2 / 4
    assert result.metrics["bridge/evidence_shift"] == pytest.approx(size, abs=1e-6)
    # turns of the version before are still known, and scored with it
    assert updater.update(with_version(mixed_batch(), 0)).version == 2


def test_states_that_agree_shift_nothing(fresh):
    """Zero advantages: F has no gradient, and AdamW does not mind the factor γ/(1+γ) but for its ε."""
    updater = fresh(TwoStateUpdater, lr=1e-3)
    result = updater.update(batch_of(PLACES[:4], advantage=0.0))
    assert max(abs(value) for row in result.evidence_shift for value in row) < 1e-3
    # a clear step was taken all the same
    assert result.metrics["bridge/adapter_drift"] > 1e-3


def test_nothing_is_computed_twice(fresh, monkeypatch):
    """One look-up of vectors; two passes with a graph; two without, the posteriors; none for p_old."""
    calls = []
    encode, of = QueryEncoder.encode_queries, BatchTensors.of

    def counted(self, queries, **settings):
        calls.append("graph" if settings.get("training") else "plain")
        return encode(self, queries, **settings)

    monkeypatch.setattr(QueryEncoder, "encode_queries", counted)
    monkeypatch.setattr(BatchTensors, "of", lambda *arguments: calls.append("vectors") or of(*arguments))
    fresh(TwoStateUpdater, lr=1e-3).update(batch_of(PLACES[:4]))
    assert sorted(calls) == ["graph", "graph", "plain", "plain", "vectors"]
    calls.clear()
    fresh(lr=1e-3).update(batch_of(PLACES[:4]))
    assert sorted(calls) == ["graph", "vectors"]


def test_steps_of_both_are_dropped_and_counted(fresh, monkeypatch):
    updater = fresh(TwoStateUpdater, lr=1e-3)
    original = BatchTensors.scores
    monkeypatch.setattr(BatchTensors, "scores", lambda *arguments: original(*arguments) * float("nan"))
    result = updater.update(batch_of(PLACES[:3]))
    assert result.version == 0 and result.metrics["bridge/steps_dropped"] == 2
    assert result.metrics["bridge/turns_not_finite"] == 3 and result.metrics["bridge/evidence_shift"] == 0.0
    assert result.evidence_shift == [[0.0] * 4] * 3
    assert all(torch.equal(value, updater.initial[name]) for name, value in updater.lower_state.items())


def test_an_empty_batch_and_an_objective_of_its_own(fresh):
    result = fresh(TwoStateUpdater).update(RetrieverBatch([], [], [], [], [], []))
    assert (result.version, result.evidence_shift) == (0, [])
    with pytest.raises(ValueError, match="leave objective out"):
        fresh(TwoStateUpdater, objective="rag")


def test_the_batch_can_be_taken_apart(fresh):
    """The shift comes in the order of the turns, whatever their groups."""
    order = [2, 0, 3, 1]
    updater = fresh(TwoStateUpdater, lr=1e-2, queries_at_once=1)
    warm(updater.encoder)
    warm_state = updater.encoder.adapter_state()
    one = updater.update(mixed_batch()).evidence_shift
    other = fresh(TwoStateUpdater, lr=1e-2, queries_at_once=64)
    other.encoder.set_adapter_state(warm_state, 0)
    two = other.update(take(mixed_batch(), order)).evidence_shift
    for position, row in enumerate(order):
        assert two[position] == pytest.approx(one[row], abs=2e-3)
