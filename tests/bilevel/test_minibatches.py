"""Minibatches: how turns are divided, and figures that do not depend on it."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bilevel.places import PLACES, batch_of, mixed_batch
from verl_bridge.bilevel.batch import RetrieverBatch


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 200), st.integers(1, 70), st.integers(1, 3))
def test_turns_are_divided_evenly_and_all_are_seen(fresh, turns, size, epochs):
    updater = fresh(minibatch_size=size, epochs=epochs)
    minibatches = updater._minibatches(turns)
    count = math.ceil(turns / size)
    assert len(minibatches) == count * epochs
    sizes = [len(rows) for rows in minibatches]
    assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
    for epoch in range(epochs):
        assert torch.cat(minibatches[epoch * count : (epoch + 1) * count]).sort().values.tolist() == list(range(turns))


def test_a_remainder_of_one_turn_takes_no_step_of_its_own(fresh):
    assert [len(rows) for rows in fresh(minibatch_size=64)._minibatches(65)] == [33, 32]
    assert [len(rows) for rows in fresh()._minibatches(65)] == [65]


def test_figures_are_those_of_the_whole_batch(fresh):
    """Unequal numbers of RL turns, candidates and hits, on an adapter that stays where it is, off p_old."""
    base = mixed_batch()
    batch = RetrieverBatch(
        base.queries,
        base.candidate_ids,
        base.answer_log_likelihood,
        [1.0, -0.5, 3.0, 0.0],
        base.rl_mask,
        base.adapter_version,
        [[False, True, False, False], [False, False], [False, True, False], [True, True, False, False]],
    )
    found = {}
    for size in (None, 3, 1):
        updater = fresh(lr=2e-2, minibatch_size=size, max_staleness=1)
        updater.minibatch_size = None
        updater.update(batch_of(PLACES[:4]))
        updater.minibatch_size, updater.learner.lr = size, 1e-30
        found[size] = updater.update(batch).metrics
        assert updater.counters["steps"] == 1 + {None: 1, 3: 2, 1: 4}[size]
    whole = found[None]
    assert 0 < whole["bridge/clip_share"] < 1 and whole["bridge/zero_advantage_share"] == pytest.approx(1 / 3)
    assert whole["bridge/loss"] == pytest.approx((whole["bridge/loss_rl"] + 0.25 * whole["bridge/loss_rag"]) / 1.25)
    for metrics in found.values():
        assert metrics.keys() == whole.keys()
        for name in metrics.keys() - {"bridge/update_seconds"}:
            if not name.startswith("bridge/grad_norm"):
                assert metrics[name] == pytest.approx(whole[name], abs=2e-4), name
