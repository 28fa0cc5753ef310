"""What goes wrong within an update: turns without finite scores stay out of it, and a failure leaves no trace."""

import math

import pytest
import torch

from tests.bilevel.places import PLACES, batch_of, differing, mixed_batch, question, take
from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.tensors import BatchTensors
from verl_bridge.bilevel.two_state import TwoStateUpdater
from verl_bridge.bilevel.updater import RetrieverUpdater


@pytest.fixture
def poison(monkeypatch):
    """Makes all scores of some queries NaN, with and without a graph."""
    original = BatchTensors.scores

    def make(*queries):
        def scores(self, vectors, group):
            bad = torch.tensor([group.texts[i] in queries for i in group.query.tolist()])
            return original(self, vectors, group).masked_fill(bad.unsqueeze(1), float("nan"))

        monkeypatch.setattr(BatchTensors, "scores", scores)

    return make


def moved(updater):
    return any(not torch.equal(p, updater.initial[name]) for name, p in updater.parameters.items())


@pytest.mark.parametrize("kind", [RetrieverUpdater, TwoStateUpdater])
@pytest.mark.parametrize("settings", [{"minibatch_size": 2}, {"epochs": 2}], ids=["minibatches", "epochs"])
def test_a_turn_without_finite_scores_is_left_out_and_counted(fresh, poison, kind, settings):
    poison(question(PLACES[1]))
    updater = fresh(kind, lr=1e-2, **settings)
    batch = batch_of(PLACES[:5], neighbours=1)
    batch = RetrieverBatch(  # open which document it is, so that the two states differ
        batch.queries, batch.candidate_ids, [[-1.5, -1.0, -1.2]] * 5, batch.advantages, [True] * 5, [0] * 5
    )
    result = updater.update(batch)
    assert result.version == 1 and moved(updater)
    assert result.metrics["bridge/turns_not_finite"] == 1 and result.metrics["bridge/steps_dropped"] == 0
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert all(p.isfinite().all() for p in updater.parameters.values())
    if kind is TwoStateUpdater:
        assert result.evidence_shift[1] == [0.0] * 3
        sizes = [max(map(abs, row)) for turn, row in enumerate(result.evidence_shift) if turn != 1]
        assert min(sizes) > 1e-5 and max(sizes) < 1


def test_the_other_turns_teach_what_they_would_alone(fresh, poison):
    """Turns of an older version, for which p_old takes a pass of its own."""
    states = []
    for turns in ([0, 1, 2, 3], [0, 2, 3]):
        updater = fresh(lr=1e-3, max_staleness=1)
        updater.update(batch_of(PLACES[4:8]))
        poison(question(PLACES[1]))
        result = updater.update(take(batch_of(PLACES[:4], advantage=[1.0, 9.0, -0.5, 2.0]), turns))
        states.append((updater.encoder.adapter_state(), result.metrics))
        poison()
    (one, metrics), (other, expected) = states
    assert metrics["bridge/turns_not_finite"] == 1 and expected["bridge/turns_not_finite"] == 0
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=0)
    for name in ("bridge/loss", "bridge/grad_norm", "bridge/distinct_top1_share", "bridge/ratio_deviation_max"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4)


def test_a_batch_without_any_finite_score_changes_nothing(fresh, poison, caplog):
    poison(*map(question, PLACES[:4]))
    updater = fresh(lr=1e-3, minibatch_size=2)
    result = updater.update(batch_of(PLACES[:4]))
    assert result.version == 0 and not moved(updater) and result.metrics["bridge/turns_not_finite"] == 4
    assert "4 of 4 retrieval turns have scores that are not finite" in caplog.text
    poison()
    assert updater.update(batch_of(PLACES[:4])).version == 1


@pytest.mark.parametrize("kind", [RetrieverUpdater, TwoStateUpdater])
def test_an_adapter_that_is_not_finite_is_an_error(fresh, kind):
    updater = fresh(kind, minibatch_size=2)
    with torch.no_grad():
        next(iter(updater.parameters.values())).fill_(float("nan"))
    with pytest.raises(ValueError, match="adapter version 0 holds values that are not finite; load a saved one"):
        updater.update(batch_of(PLACES[:4]))


@pytest.mark.parametrize("place", ["second minibatch", "second state", "figures"])
def test_an_update_that_fails_leaves_everything_as_it_was(fresh, place):
    settings = {"lr": 1e-2, "minibatch_size": 2, "max_staleness": 1, "seed": 7}
    batch = batch_of(PLACES[4:8], version=1)
    expected = fresh(TwoStateUpdater, **settings)
    expected.update(mixed_batch())
    expected.update(batch)
    state = expected.state()

    updater = fresh(TwoStateUpdater, **settings)
    updater.update(mixed_batch())
    before, version, calls = updater.state(), updater.encoder.adapter_version, []
    updater.collapsed = True
    owner, name, failing = {
        "second minibatch": (updater.learner, "_step", 2),
        "second state": (updater.lower, "_step", 2),
        "figures": (updater, "_watch", 1),
    }[place]
    true = getattr(owner, name)

    def fails(*arguments):
        calls.append(name)
        if len(calls) == failing:
            adapter = updater.encoder.adapter_state()  # the weights are others by then
            assert not all(torch.equal(value, adapter[name]) for name, value in before.adapters["adapter"].items())
            raise torch.OutOfMemoryError("out of memory")
        return true(*arguments)

    setattr(owner, name, fails)
    with pytest.raises(torch.OutOfMemoryError):
        updater.update(batch)
    assert len(calls) == failing
    assert differing(updater.state(), before) == [] and updater.encoder.adapter_version == version == 1
    assert updater.known_versions() == [0, 1] and updater.collapsed
    assert all(p.grad is None for p in updater.parameters.values())
    delattr(owner, name)
    updater.update(batch)
    assert differing(updater.state(), state) == []
