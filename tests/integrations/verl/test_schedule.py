"""Who learns when, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_bridge.config.schema import BridgeConfig, ConfigError
from verl_bridge.integrations.verl.schedule import (
    PHASED,
    Learners,
    count_updates,
    first_phase_steps,
    learners,
    retriever_objective,
    update_is_due,
)

SCHEDULES = BridgeConfig.__dataclass_fields__["schedule"].metadata["choices"]
POLICY, RETRIEVER = Learners(True, False), Learners(False, True)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ("bridge", [Learners(True, True)] * 4),
        ("frozen", [POLICY] * 4),
        ("rag_then_rl", [RETRIEVER, POLICY, POLICY, POLICY]),
        ("rl_then_rag", [POLICY, RETRIEVER, RETRIEVER, RETRIEVER]),
        ("joint", [Learners(True, True, policy_first=True)] * 4),
    ],
)
def test_who_learns_with_a_first_phase_of_one_step(schedule, steps):
    assert [learners(schedule, step, first_phase=1) for step in (1, 2, 3, 4)] == steps


@pytest.mark.parametrize(
    ("schedule", "estimator", "objective"),
    [
        ("bridge", "bridge", "penalised"),
        ("bridge", "two_state", "penalised"),
        ("bridge", "drop", "rag"),
        ("frozen", "bridge", None),
        ("rag_then_rl", "bridge", "rag"),
        ("rl_then_rag", "bridge", "rag"),
        ("joint", "bridge", "rl"),
    ],
)
def test_what_the_retriever_follows(schedule, estimator, objective):
    assert retriever_objective(schedule, estimator) == objective


def test_the_first_phase_is_half_of_the_run_or_what_is_asked_for():
    assert [first_phase_steps("rag_then_rl", None, total) for total in (1, 2, 5, 250)] == [1, 1, 2, 125]
    assert first_phase_steps("rl_then_rag", 3, 4) == 3 and first_phase_steps("bridge", None, 250) == 0
    with pytest.raises(ConfigError, match=r"bridge.schedule_steps=4 of 4 steps .*second phase of schedule=rl_then_rag"):
        first_phase_steps("rl_then_rag", 4, 4)


def test_updates_of_a_run():
    def count(schedule, **more):
        return count_updates(schedule, total_steps=10, first_phase=4, **more)

    assert [count(s) for s in ("bridge", "joint", "rag_then_rl", "rl_then_rag", "frozen")] == [10, 10, 4, 6, 0]
    # every third batch: 3, 6, 9 | of steps 1 to 4: 3 | of steps 5 to 10: 6, 9
    assert [count(s, interval=3) for s in ("bridge", "rag_then_rl", "rl_then_rag")] == [3, 1, 2]
    assert count("bridge", interval=3, batches_per_step=2) == 6  # batches 3, 6, 9, 12, 15, 18 of 20


@given(st.sampled_from(SCHEDULES), st.integers(2, 30), st.integers(1, 4), st.integers(1, 5), st.data())
def test_the_count_is_that_of_the_batches_the_retriever_learns_from(schedule, total, batches, interval, data):
    phase = data.draw(st.integers(1, total - 1)) if schedule in PHASED else 0
    learnt = sum(
        learners(schedule, step, first_phase=phase).retriever
        and update_is_due(step, local_step=local, batches_per_step=batches, interval=interval)
        for step in range(1, total + 1)
        for local in range(batches)
    )
    counted = count_updates(schedule, total_steps=total, first_phase=phase, batches_per_step=batches, interval=interval)
    assert counted == learnt
