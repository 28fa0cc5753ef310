"""The trainer's hooks with verl, Ray and the models replaced: in which order things happen, and what stops a run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl_bridge import credit
from verl_bridge.algorithms.grounding import RolloutType
from verl_bridge.bilevel.updater import UpdateResult
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.integrations.verl import trainer
from verl_bridge.integrations.verl.rollouts import RolloutBatch
from verl_bridge.trace import SearchTrace, SearchTurn

DOCUMENTS = {i: {"id": i, "title": i, "text": f"{i} Lima" if i == "b" else i} for i in "ab"}


def call(events, name, answer=None):
    """A method of an actor."""

    def remote(*arguments):
        events.append((name, *arguments))
        return answer(*arguments) if callable(answer) else answer

    return SimpleNamespace(remote=remote)


class Retrieval:
    """TrainerRetrieval's place: the learner at version 3, which everybody serves."""

    def __init__(self, events, publishes):
        self.events, self.publishes, self.stale = events, publishes, None
        self.actor = SimpleNamespace(
            documents=call(events, "documents", lambda ids: [DOCUMENTS[i] for i in ids]),
            update=call(events, "update", UpdateResult(4, {"bridge/loss": 0.5})),
            load=call(events, "load"),
            save=call(events, "save"),
            save_adapter=call(events, "save_adapter"),
        )

    def check_served(self, versions):
        self.events.append(("check_served", list(versions)))
        if self.stale:
            raise self.stale

    def publish(self, *, begin=False):
        self.events.append(("publish", begin))

    def recall(self, probe, shown):
        return {"recall_shown": 0.5, "n": float(len(probe)), "adapter_version": 3.0}

    def search(self, queries, top_k):
        self.events.append(("search", list(queries), top_k))
        return [self.answers[query] for query in queries]

    def stop(self):
        self.events.append(("stop",))


class Verl:
    """What the mixin calls of verl's trainer."""

    fails = None

    def _compute_advantage(self, batch, metrics):
        return batch

    def fit(self, agent_loop_manager):
        self.events.append(("fit",))
        if self.fails:
            raise self.fails

    def _load_checkpoint(self):
        self.global_steps = self.resumed_step

    def _save_checkpoint(self):
        self.events.append(("verl saves",))

    def _validate(self):
        return {"val/em": 0.25}


class Letters:
    """A tokenizer."""

    def encode(self, text, **_):
        return list(text.encode())


class Trainer(trainer.SearchTrainerMixin, Verl):
    verl_mode = "sync"

    def __init__(self, tmp_path, *, bridge=True, publishes=True):
        self.settings = VerlBridgeConfig.from_mapping({"bridge": {"enable": bridge}})
        self.config = OmegaConf.create(
            {
                "algorithm": {},
                "trainer": {"default_local_dir": str(tmp_path), "resume_mode": "auto"},
                "actor_rollout_ref": {"rollout": {"log_prob_max_token_len_per_gpu": 512, "temperature": 1.0}},
            }
        )
        self.events, self.timing_raw, self.probe = [], {}, [("q", ["Lima"])]
        self.retrieval = Retrieval(self.events, publishes)
        self.retriever = self.retrieval.actor
        self.base_estimator, self.global_steps, self.resumed_step = "grpo", 7, 5
        self.actor_rollout_wg = None
        self.tokenizer = Letters()


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(trainer.ray, "get", lambda value: value)
    monkeypatch.setattr(trainer, "score_answers", lambda group, sequences, **_: [-1.0] * len(sequences))


def rollouts():
    """Two rollouts of one prompt: one search answered by version 3 and one that failed."""
    found = {"candidate_ids": ("a", "b"), "candidate_scores": (0.5, 0.4), "shown": 2, "adapter_version": 3}
    turns = (SearchTurn("search", (0, 4), query="q", status="ok", **found),)
    failed = (SearchTurn("search", (0, 4), query="q", status="error"),)
    traces = [SearchTrace("?", ("Lima",), t, None, None, "max_turns", 4) for t in (turns, failed)]
    return RolloutBatch(
        keys=["0", "1"],
        uids=["u", "u"],
        traces=traces,
        prompt_ids=[[1], [1]],
        response_ids=[[11, 12, 13, 14], [21, 22, 23, 24]],
        response_mask=torch.ones(2, 4),
        advantages=torch.tensor([[0.7] * 4, [-0.7] * 4]),
        rewards=torch.tensor([1.0, 0.0]),
        group_index=torch.tensor([0, 0]),
        columns={},
    )


def update(made):
    batch = rollouts()
    return made._update_retriever(
        batch, credit.batch_signals(batch.traces, batch.group_index), torch.tensor([0.7, -0.7])
    )


def names(made):
    return [event[0] for event in made.events]


def test_an_update_is_published_after_it_was_made_and_its_time_is_told(tmp_path):
    made = Trainer(tmp_path)
    metrics = update(made)
    assert names(made) == ["documents", "check_served", "update", "publish"] and metrics["bridge/loss"] == 0.5
    batch = made.events[2][1]
    # the failed search is no turn of the batch; the one that was answered keeps the version that served it
    assert made.events[1] == ("check_served", [3]) and batch.adapter_version == [3] and batch.queries == ["q"]
    assert batch.candidate_ids == [("a", "b")] and batch.hits == [[False, True]]
    assert batch.advantages == [pytest.approx(0.7)] and batch.rl_mask == [True]
    assert made.events[3] == ("publish", False)
    assert {"likelihood", "retriever_update", "publish_adapter"} == set(made.timing_raw)


@pytest.mark.parametrize(("context", "ids"), [("question", (1,)), ("prefix", (1, 11, 12, 13, 14))])
def test_what_precedes_the_document(tmp_path, monkeypatch, context, ids):
    """The question's prompt, or the trajectory up to and including the query: the first turn's span is 0 to 4."""
    planned = []
    plan = trainer.plan_likelihoods

    def remember(turns, *args, **kwargs):
        planned.append((turns, kwargs["after_query"]))
        return plan(turns, *args, **kwargs)

    monkeypatch.setattr(trainer, "plan_likelihoods", remember)
    made = Trainer(tmp_path)
    made.settings = VerlBridgeConfig.from_mapping({"bridge": {"enable": True, "likelihood_context": context}})
    update(made)
    ((turns, after_query),) = planned
    assert turns[0].context_ids == ids and after_query is (context == "prefix")


def test_the_learner_encodes_what_the_rollouts_searched_for(tmp_path):
    made = Trainer(tmp_path)
    made.settings = VerlBridgeConfig.from_mapping(
        {"bridge": {"enable": True}, "retriever": {"query_input": "question_query"}}
    )
    update(made)
    assert made.events[2][1].queries == ["? q"]


def test_an_actor_alone_has_nothing_to_publish(tmp_path):
    made = Trainer(tmp_path, publishes=False)
    update(made)
    assert names(made) == ["documents", "check_served", "update"] and "publish_adapter" not in made.timing_raw


def test_rollouts_of_another_version_stop_the_run_before_the_learner_sees_them(tmp_path):
    made = Trainer(tmp_path)
    made.retrieval.stale = RuntimeError("answered by adapter version 0")
    with pytest.raises(RuntimeError, match="answered by adapter version 0"):
        update(made)
    assert names(made) == ["documents", "check_served"]


def test_a_resumed_run_publishes_what_it_loaded(tmp_path):
    made = Trainer(tmp_path)
    made._load_checkpoint()
    assert made.events == [("load", str(tmp_path / "global_step_5" / "retriever")), ("publish", True)]
    for changes in ({"resumed_step": 0}, {"settings": VerlBridgeConfig()}):
        fresh = Trainer(tmp_path)
        vars(fresh).update(changes)
        fresh._load_checkpoint()
        assert fresh.events == []


def test_serving_ends_with_the_training_however_it_ends(tmp_path):
    made = Trainer(tmp_path)
    made.fit(None)
    assert names(made) == ["fit", "save_adapter", "stop"]
    made.events.clear()
    made.fails = ValueError("out of memory")
    with pytest.raises(ValueError, match="out of memory"):
        made.fit(None)
    assert names(made) == ["fit", "stop"]
    plain = Trainer(tmp_path, bridge=False)
    plain.fit(None)
    assert names(plain) == ["fit", "stop"]


def test_recall_of_whoever_serves_is_logged_at_validations(tmp_path):
    made = Trainer(tmp_path)
    assert made._validate() == {
        "val/em": 0.25,
        "val/retrieval/recall_shown": 0.5,
        "val/retrieval/n": 1.0,
        "val/retrieval/adapter_version": 3.0,
    }
    made.probe = []
    assert made._validate() == {"val/em": 0.25}


def test_the_adapter_is_saved_before_verl_says_that_the_step_is(tmp_path):
    made = Trainer(tmp_path)
    made._save_checkpoint()
    assert made.events == [("save", str(tmp_path / "global_step_7" / "retriever")), ("verl saves",)]


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
    made = Trainer(tmp_path, bridge=False)
    made.settings = VerlBridgeConfig.from_mapping({"gca": {"enable": True, "salience": "uniform"}, "trace_interval": 0})
    made.batch, made.written = rollouts(), []
    monkeypatch.setattr(trainer, "read_rollouts", lambda batch, columns: made.batch)
    monkeypatch.setattr(trainer, "write_advantages", lambda batch, _, advantages: made.written.append(advantages))
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

    monkeypatch.setattr(trainer, "marked_timer", timer)
    monkeypatch.setattr(step, "_update_retriever", lambda *_: events.append("bridge") or {})
    for where, name in ((step, "_signals"), (trainer, "grounding_metrics"), (credit, "ground")):
        told(where, name)
    step._compute_advantage(None, {})
    before = ["gca starts", "_signals", "grounding_metrics", "gca ends"]
    assert events == [*before, "bridge", "gca starts", "ground", "gca ends"] and len(step.written) == 1


def test_serving_ends_when_verls_trainer_cannot_be_made(monkeypatch):
    class Broken:
        def __init__(self, config):
            raise MemoryError("no room for the workers")

    class BrokenTrainer(trainer.SearchTrainerMixin, Broken):
        verl_mode = "sync"

    events = []
    monkeypatch.setattr(trainer, "load_settings", lambda config: VerlBridgeConfig())
    monkeypatch.setattr(trainer, "prepare_config", lambda *_: "grpo")
    monkeypatch.setattr(trainer, "TrainerRetrieval", lambda *_, **__: Retrieval(events, False))
    with pytest.raises(MemoryError, match="no room"):
        BrokenTrainer(OmegaConf.create({"data": {}}))
    assert events == [("stop",)]
