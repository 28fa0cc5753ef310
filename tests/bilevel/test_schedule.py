"""Who learns when, and how often."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.bilevel.schedule import (
    PHASED,
    Learners,
    check_course,
    count_updates,
    first_phase_steps,
    learners,
    retriever_objective,
    update_is_due,
)
from verl_bridge.config.schema import BridgeConfig, ConfigError

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
    assert [first_phase_steps("rag_then_rl", None, total) for total in (2, 3, 5, 250)] == [1, 1, 2, 125]
    assert first_phase_steps("rl_then_rag", 3, 4) == 3 and first_phase_steps("bridge", None, 250) == 0
    assert first_phase_steps("bridge", None, 1) == 0  # one phase needs no room for another
    for steps, total, fix in (
        (4, 4, "lower it, or raise"),
        (9, 4, "lower it, or raise"),
        (None, 1, "raise"),
        (1, 1, "raise"),
    ):
        with pytest.raises(ConfigError) as error:
            first_phase_steps("rl_then_rag", steps, total)
        assert str(error.value) == (
            f"verl_bridge.bridge.schedule_steps={steps}, a first phase of {steps or 1} steps, leaves none for the "
            f"second phase of schedule=rl_then_rag with trainer.total_training_steps={total}: "
            f"{fix} trainer.total_training_steps"
        )


def test_updates_of_a_run():
    def count(schedule, **more):
        return count_updates(schedule, total_steps=10, first_phase=4, **more)

    assert [count(s) for s in ("bridge", "joint", "rag_then_rl", "rl_then_rag", "frozen")] == [10, 10, 4, 6, 0]
    # every third batch: 3, 6, 9 | of steps 1 to 4: 3 | of steps 5 to 10: 6, 9
    assert [count(s, interval=3) for s in ("bridge", "rag_then_rl", "rl_then_rag")] == [3, 1, 2]
    assert count("bridge", interval=3, batches_per_step=2) == 6  # batches 3, 6, 9, 12, 15, 18 of 20


@settings(deadline=None)
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


@pytest.mark.parametrize(("schedule", "updates"), [("rag_then_rl", 0), ("rl_then_rag", 1)])
def test_a_phase_of_the_retriever_in_which_nobody_would_learn_is_refused(schedule, updates):
    """A first phase of 3 of 10 steps, an update every 6 steps: step 6 lies in the second."""
    bridge = BridgeConfig(schedule=schedule, schedule_steps=3, interval=6)
    assert count_updates(schedule, total_steps=10, first_phase=3, interval=6) == updates
    if updates:
        check_course(bridge, updates=updates, total_steps=10)
        return
    with pytest.raises(ConfigError) as error:
        check_course(bridge, updates=0, total_steps=10)
    assert str(error.value) == (
        "verl_bridge.bridge.interval=6 leaves no retriever update, so nobody would learn in the retriever's phase of "
        "schedule=rag_then_rl with schedule_steps=3 and trainer.total_training_steps=10: lower the interval, or make "
        "that phase longer"
    )


def test_a_learning_rate_that_falls_needs_updates_to_fall_over():
    none = {"updates": 0, "total_steps": 5}
    check_course(BridgeConfig(interval=10), **none)
    check_course(BridgeConfig(interval=10, lr_warmup=2), **none)  # cut short before it began
    for schedule in ("linear", "cosine"):
        check_course(BridgeConfig(lr_schedule=schedule), updates=1, total_steps=5)
        with pytest.raises(ConfigError) as error:
            check_course(BridgeConfig(interval=10, lr_schedule=schedule), **none)
        assert str(error.value) == (
            f"verl_bridge.bridge.lr_schedule={schedule} ends with the last retriever update, but "
            "verl_bridge.bridge.interval=10, schedule=bridge and schedule_steps=None leave none in "
            "trainer.total_training_steps=5: lower the interval, raise the steps, or set lr_schedule=constant"
        )
    falling = BridgeConfig(lr_schedule="cosine", lr_warmup=3)
    check_course(falling, updates=3, total_steps=3)
    with pytest.raises(
        ConfigError, match=r"bridge\.lr_warmup=3 is more than the 2 retriever updates of trainer\.total"
    ):
        check_course(falling, updates=2, total_steps=2)
