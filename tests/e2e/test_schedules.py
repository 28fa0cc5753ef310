"""Schedules and estimators, two steps each: who moved in which step, and what a policy update carried."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

WITHOUT_TESTS = ("trainer.val_before_train=False", "trainer.test_freq=-1")


def policy_updates(run):
    """The steps in which verl updated the policy, which moved where there was a gradient (equal rewards have none)."""
    steps = [step for step, data in run.metrics.items() if "actor/grad_norm" in data]
    for step, record in run.steps.items():
        moved = record["policy_before"] != record["policy_after"]
        assert moved == (run.metrics[step].get("actor/grad_norm", 0) > 0)
    return steps


def saved_adapter(run, step):
    folder = run.folder / "checkpoints" / f"global_step_{step}" / "retriever" / "adapter"
    return load_file(folder / "adapter_model.safetensors")


def test_the_retriever_first_then_the_policy(start):
    """The adapter that phase one made serves phase two and is saved with it."""
    schedule = ("verl_bridge.bridge.schedule=rag_then_rl", "verl_bridge.bridge.schedule_steps=1")
    run = start("rag_then_rl", "bridge_gca", 2, *schedule, *WITHOUT_TESTS, "trainer.save_freq=1")
    assert policy_updates(run) == [2]
    assert [run.steps[i]["version_after"] for i in (1, 2)] == [1, 1] and run.steps[2]["versions"] == [1]
    first, second = saved_adapter(run, 1), saved_adapter(run, 2)
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert all(value.norm() > 0 for name, value in first.items() if "lora_B" in name)
    assert run.metrics[1]["bridge/plan/turns_used"] > 0 and "bridge/plan/turns_used" not in run.metrics[2]
    assert [run.metrics[i]["bridge/schedule/policy_learns"] for i in (1, 2)] == [0, 1]


def test_both_from_rl_credit_alone(start):
    run = start("joint", "bridge", 2, "verl_bridge.bridge.schedule=joint", *WITHOUT_TESTS)
    assert policy_updates(run) == [1, 2]
    for step in (1, 2):
        record = run.steps[step]
        assert record["versions"] == [step - 1]
        # the retriever still has the version that served while the policy is updated
        assert (record["now_version"], record["version_after"]) == (step - 1, step)
        assert run.metrics[step]["bridge/plan/turns_used"] > 0
    assert all(value.norm() > 0 for name, value in run.adapter().items() if "lora_B" in name)


def test_the_correction_of_two_states_goes_through_verls_update_and_leaves_nothing(start):
    run = start("two_state", "bridge_gca", 2, "verl_bridge.bridge.estimator=two_state", *WITHOUT_TESTS)
    assert policy_updates(run) == [1, 2]
    for step in (1, 2):
        record, data = run.steps[step], run.metrics[step]
        assert all(math.isfinite(value) for value in data.values())
        assert record["version_after"] == step
        assert data["bridge/correction/rows"] >= data["bridge/correction/sequences"] > 0
        assert data["bridge/correction/rows"] % 8 == 0  # four rollouts a question, two mini-batches
        assert data["bridge/correction/weight"] > 0 and data["bridge/evidence_shift"] > 0
        assert record["rows"] == 16 and record["actor_receives_it"]
        assert record["advantages_stay"] and record["keys_left"] == []


def test_a_retriever_that_follows_the_rag_loss_alone_and_learns_in_an_actor_of_its_own(start):
    own = "verl_bridge.bridge.worker=own"
    run = start("drop", "bridge", 1, "verl_bridge.bridge.estimator=drop", own, *WITHOUT_TESTS)
    step = run.steps[1]
    assert policy_updates(run) == [1] and step["versions"] == [0] and step["version_after"] == 1
    server, learner = step["actors"]
    assert learner == f"{server}_learner"  # whose adapter the other one was given
    assert step["served_after"] == 1 and run.metrics[1]["bridge/publish_seconds"] > 0
    assert run.metrics[1]["bridge/loss"] == pytest.approx(run.metrics[1]["bridge/loss_rag"], rel=1e-5)
