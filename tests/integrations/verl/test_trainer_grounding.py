"""GCA in the trainer: grounding of a batch, oracle searches, the identity, and what the step's time holds."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from trainer_standins import DOCUMENTS, Trainer, rollouts

from verl_bridge import credit
from verl_bridge.algorithms.grounding import RolloutType
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.integrations import methods
from verl_bridge.integrations.verl import mixin
from verl_bridge.trace import SearchTrace, SearchTurn


def answered(*documents, status="ok"):
    return {"status": status, "documents": [DOCUMENTS[i] for i in documents]}


def right_or_wrong(*rows):
    """Rollouts without a search: (question, gold, group, right)."""
    turns = (SearchTurn("answer", (0, 4)),)
    traces = [
        SearchTrace(question, (gold,), turns, gold if right else "no idea", (1, 3), "answer", 4)
        for question, gold, _, right in rows
    ]
    rewards = torch.tensor([float(right) for *_, right in rows])
    return replace(
        rollouts(),
        traces=traces,
        response_mask=torch.ones(len(rows), 4),
        rewards=rewards,
        group_index=torch.tensor([group for _, _, group, _ in rows]),
        advantages=torch.stack([rewards] * 4, dim=1),
    )


def test_oracle_answers_go_to_the_rows_of_their_group_in_one_call(tmp_path):
    made = Trainer(tmp_path)
    # groups 0 and 1 have one text and different golds, group 2 is wrong throughout, group 3's search fails
    batch = right_or_wrong(
        ("?", "Lima", 0, True),
        ("?", "Quito", 1, True),
        ("x", "Lima", 2, False),
        ("?", "Lima", 0, False),
        ("y", "Lima", 3, True),
        ("z", "Lima", 4, True),
    )
    made.retrieval.answers = {
        "? Lima": answered("a", "b"),
        "? Quito": answered("a", "b"),
        "y Lima": answered(status="error"),
        "z Lima": answered("a"),
    }
    hit, known = made._oracle_hits(batch)
    assert made.events == [("search", ["? Lima", "? Quito", "y Lima", "z Lima"], made.settings.retriever.shown)]
    assert hit.tolist() == [True, False, False, True, False, False]
    assert known.tolist() == [True, True, False, True, False, True]


def test_a_failed_oracle_search_leaves_the_type_that_the_group_gives(tmp_path):
    made = Trainer(tmp_path)
    made.settings = VerlBridgeConfig.from_mapping({"gca": {"enable": True, "oracle_query": True}})
    made.retrieval.answers = {"? Lima": answered(status="error"), "x Lima": answered(status="error")}
    # alone in its group, and one of two
    signals = made._signals(right_or_wrong(("?", "Lima", 0, True), ("x", "Lima", 1, True), ("x", "Lima", 1, False)))
    assert [RolloutType(code).name for code in signals.types.tolist()] == ["D_UNDETERMINED", "D_NOT_RETRIEVABLE", "C"]
    made.retrieval.answers = {"? Lima": answered("a"), "x Lima": answered("b")}
    signals = made._signals(right_or_wrong(("?", "Lima", 0, True), ("x", "Lima", 1, True), ("x", "Lima", 1, False)))
    assert [RolloutType(code).name for code in signals.types.tolist()] == ["D_NOT_RETRIEVABLE", "D_RETRIEVABLE", "C"]


@pytest.fixture
def step(tmp_path, monkeypatch):
    """A trainer with GCA on, whose batch is ``step.batch``."""
    made = Trainer(tmp_path, bridge={"enable": False}, gca={"enable": True, "salience": "uniform"}, trace_interval=0)
    made.batch, made.written = rollouts(), []
    monkeypatch.setattr(mixin, "read_rollouts", lambda batch, columns: made.batch)
    monkeypatch.setattr(mixin, "write_advantages", lambda batch, _, advantages: made.written.append(advantages))
    return made


def found_and_missed():
    """Four rollouts of one prompt: a right and a wrong one with a hit, and both without."""
    found = {"candidate_ids": ("b",), "candidate_scores": (0.5,), "shown": 1, "adapter_version": 3}
    traces = []
    for text, answer in (("Lima", "Lima"), ("Lima", "x"), ("Quito", "Lima"), ("Quito", "x")):
        observed = f"<information>Doc 1(Title: t) {text}</information>"
        search = SearchTurn(
            "search", (0, 4), query="q", status="ok", **found, observation_span=(4, 8), observation=observed
        )
        traces.append(
            SearchTrace("?", ("Lima",), (search, SearchTurn("answer", (8, 12))), answer, (9, 11), "answer", 12)
        )
    mask = torch.ones(4, 12)
    mask[:, 4:8] = 0
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    return replace(
        rollouts(),
        traces=traces,
        response_mask=mask,
        rewards=rewards,
        group_index=torch.zeros(4, dtype=torch.int64),
        advantages=((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None] * mask,
    )


def test_the_identity_compares_verls_own_advantage_with_the_covariance(step):
    step.batch = found_and_missed()
    metrics: dict = {}
    step._compute_advantage(None, metrics)
    # H = 1 for rows 0 and 1, R = (1, 0, 0, 0), σ = 1/2: 2·(1/2 − 1/4)/σ = 1
    assert metrics["grounding/identity_covariance"] == pytest.approx(1.0)
    assert metrics["grounding/identity_advantage"] == pytest.approx(1.0, abs=1e-5)
    step.batch = replace(step.batch, advantages=2 * step.batch.advantages)  # advantages of another reward
    step._compute_advantage(None, metrics)
    assert metrics["grounding/identity_covariance"] == pytest.approx(1.0)
    assert metrics["grounding/identity_advantage"] == pytest.approx(2.0, abs=1e-5)


def test_the_time_of_gca_is_all_of_it_and_nothing_of_bridge(step, monkeypatch):
    step.batch, events = found_and_missed(), []
    step.settings = replace(step.settings, bridge=replace(step.settings.bridge, enable=True))

    @contextmanager
    def timer(name, timing_raw):
        events.append(f"{name} starts")
        yield
        events.append(f"{name} ends")

    def told(where, name):
        made = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *arguments, **more: (events.append(name), made(*arguments, **more))[1])

    monkeypatch.setattr(mixin, "marked_timer", timer)
    monkeypatch.setattr(step, "_update_retriever", lambda *_: events.append("bridge") or {})
    for where, name in ((step, "_signals"), (methods, "grounding_metrics"), (credit, "ground")):
        told(where, name)
    step._compute_advantage(None, {})
    before = ["gca starts", "_signals", "grounding_metrics", "gca ends"]
    assert events == [*before, "bridge", "gca starts", "ground", "gca ends"] and len(step.written) == 1
