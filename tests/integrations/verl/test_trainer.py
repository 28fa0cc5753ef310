"""The trainer's hooks with verl, Ray and the models replaced: in which order things happen, and what stops a run."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl_bridge import credit
from verl_bridge.algorithms.grounding import RolloutType
from verl_bridge.bilevel.learner import AdapterLearner
from verl_bridge.bilevel.two_state import TwoStateUpdater
from verl_bridge.bilevel.updater import RetrieverUpdater, UpdateResult
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.integrations import methods
from verl_bridge.integrations.verl import mixin
from verl_bridge.integrations.verl.correction import Correction
from verl_bridge.integrations.verl.rollouts import RolloutBatch
from verl_bridge.trace import SearchTrace, SearchTurn

DOCUMENTS = {i: {"id": i, "title": i, "text": f"{i} Lima" if i == "b" else i} for i in "ab"}


class Retrieval:
    """TrainerRetrieval's place: the learner at version 3, which everybody serves."""

    def __init__(self, events):
        self.events = events

    def documents(self, ids):
        self.events.append(("documents", ids))
        return [DOCUMENTS[i] for i in ids]

    def check_served(self, versions, *, older=False):
        self.events.append(("check_served", list(versions), older))

    def known_versions(self):
        return {3}

    def update(self, batch):
        self.events.append(("update", batch))
        return UpdateResult(4, {"bridge/loss": 0.5})

    def load(self, folder):
        self.events.append(("load", str(folder)))

    def save(self, folder):
        self.events.append(("save", str(folder)))

    def save_adapter(self, folder):
        self.events.append(("save_adapter", str(folder)))

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
    parameter_sync_step, local_trigger_step = 1, 0

    def _init_dataloader(self):
        self.train_dataset = self.val_dataset = SimpleNamespace(dataframe=[])

    def _step_once(self, metrics, timing_raw, sample_batch_size):
        batch = self._compute_advantage(KVBatchMeta(partition_id="train"), metrics)
        return self._update_actor(self._update_critic(batch, metrics), metrics)

    def _compute_advantage(self, batch, metrics):
        return batch

    def _update_critic(self, batch, metrics):
        self.events.append(("critic",))
        return batch

    def _update_actor(self, batch, metrics):
        self.events.append(("actor", list(batch.keys), self.config.actor_rollout_ref.actor.ppo_mini_batch_size))
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

    eos_token_id = 0

    def encode(self, text, **_):
        return list(text.encode())


class Trainer(mixin.SearchTrainerMixin, Verl):
    verl_mode = "sync"

    def __init__(self, tmp_path, bridge=None, gca=None, **settings):
        self.settings = VerlBridgeConfig.from_mapping(
            {"bridge": {"enable": True, **(bridge or {})}, "gca": gca or {}, **settings}
        )
        rollout = {"log_prob_max_token_len_per_gpu": 512, "temperature": 1.0, "n": 2}
        actor = {"ppo_mini_batch_size": 1, "ppo_max_token_len_per_gpu": 300, "use_dynamic_bsz": True}
        actor["loss_agg_mode"] = "token-mean"
        self.config = OmegaConf.create(
            {
                "algorithm": {},
                "data": {"seed": 3},
                "trainer": {"default_local_dir": str(tmp_path), "resume_mode": "auto"},
                "actor_rollout_ref": {"rollout": rollout, "actor": actor},
            }
        )
        self.events, self.timing_raw, self.probe = [], {}, [("q", ["Lima"])]
        self.retrieval = Retrieval(self.events)
        self.base_estimator, self.global_steps, self.resumed_step, self.first_phase = "grpo", 7, 5, 7
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
        self.tokenizer = Letters()


@pytest.fixture(autouse=True)
def no_workers(monkeypatch):
    monkeypatch.setattr(mixin, "answer_log_probs", lambda group, sequences, **_: [-torch.ones(1)] * len(sequences))


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


def names(made):
    return [event[0] for event in made.events]


def run_step(made, monkeypatch, batch=None):
    """One local step of verl's over a batch."""
    monkeypatch.setattr(mixin, "read_rollouts", lambda *_: batch or rollouts())
    monkeypatch.setattr(methods, "save_rollouts", lambda file, *_, **__: made.events.append(("traces", file.name)))
    metrics: dict = {}
    made._step_once(metrics, made.timing_raw, 2)
    return metrics


LEARNING = ["check_served", "documents", "update"]


@pytest.mark.parametrize(
    ("bridge", "happens"),
    [
        ({}, [*LEARNING, "traces", "critic", "actor"]),
        ({"schedule": "frozen"}, ["traces", "critic", "actor"]),
        ({"schedule": "joint"}, ["traces", "critic", "actor", *LEARNING]),
        ({"schedule": "rag_then_rl"}, [*LEARNING, "traces"]),
        ({"schedule": "rl_then_rag"}, ["traces", "critic", "actor"]),
        ({"interval": 2}, ["traces", "critic", "actor"]),
        ({"interval": 7}, [*LEARNING, "traces", "critic", "actor"]),
        ({"enable": False}, ["traces", "critic", "actor"]),
    ],
)
def test_who_learns_in_step_7_of_a_first_phase_of_7(tmp_path, monkeypatch, bridge, happens):
    made = Trainer(tmp_path, bridge=bridge)
    metrics = run_step(made, monkeypatch)
    assert names(made) == happens
    assert metrics.get("bridge/loss") == (0.5 if "update" in happens else None)
    phased = "then" in bridge.get("schedule", "")
    assert metrics.get("bridge/schedule/policy_learns") == (float("actor" in happens) if phased else None)
    made.events.clear()
    made.global_steps = 8
    run_step(made, monkeypatch)
    if phased:  # the second phase
        others = {"rag_then_rl": ["traces", "critic", "actor"], "rl_then_rag": [*LEARNING, "traces"]}
        assert names(made) == others[bridge["schedule"]]


def test_batches_of_a_step_count_and_have_files_of_their_own(tmp_path, monkeypatch):
    made = Trainer(tmp_path, bridge={"interval": 3})
    made.parameter_sync_step, made.global_steps = 2, 2  # batches 3 and 4
    learnt = []
    for made.local_trigger_step in (0, 1):
        made.events.clear()
        run_step(made, monkeypatch)
        learnt.append("update" in names(made))
        assert ("traces", f"step_000002_{made.local_trigger_step}.jsonl") in made.events
    assert learnt == [True, False]
    made.parameter_sync_step = 1
    run_step(made, monkeypatch)
    assert made.events[-3] == ("traces", "step_000002.jsonl")


def test_what_the_settings_make_of_the_step(tmp_path):
    chosen = {"likelihood_context": "prefix", "golds": "best", "length_normalise": True, "token_budget": 99}
    made = Trainer(tmp_path, bridge={**chosen, "gamma": 0.5, "tau_likelihood": 2.0, "micro_batch_tokens": 400})
    step = made._retriever_step()
    assert (step.prefix, step.all_golds, step.length_normalise, step.token_budget) == (True, True, True, 99)
    assert (step.max_tokens, step.synchronous, step.correction_scale) == (400, True, 0.25)
    made = Trainer(tmp_path, bridge={"estimator": "two_state"}, retriever={"query_input": "question_query"})
    made.verl_mode = "colocate_async"
    step = made._retriever_step()
    # its sequences go through the policy update, too, whose micro-batches hold 300 tokens
    assert (step.max_tokens, step.synchronous, step.query_input) == (300, False, "question_query")
    assert not step.prefix and not step.all_golds and step.token_budget is None


@pytest.mark.parametrize(
    ("bridge", "mode", "kind", "objective", "updates", "staleness"),
    [
        ({}, "sync", RetrieverUpdater, "penalised", 10, 0),
        ({"estimator": "drop"}, "colocate_async", RetrieverUpdater, "rag", 10, 8),
        ({"schedule": "joint", "interval": 3}, "sync", RetrieverUpdater, "rl", 3, 0),
        ({"schedule": "rag_then_rl"}, "sync", RetrieverUpdater, "rag", 5, 0),
        ({"schedule": "rl_then_rag", "schedule_steps": 3}, "sync", RetrieverUpdater, "rag", 7, 0),
        ({"estimator": "two_state", "max_staleness": 1}, "separate_async", TwoStateUpdater, None, 10, 1),
    ],
)
def test_the_updater_of_a_run_of_10_steps(tmp_path, monkeypatch, bridge, mode, kind, objective, updates, staleness):
    learning = {"lr_schedule": "cosine", "lr_warmup": 2, "weight_decay": 0.1, "max_grad_norm": 2.0}
    made = Trainer(tmp_path, bridge={**bridge, **learning, "compute_dtype": "auto"})
    made.verl_mode, made.total_training_steps, started = mode, 10, {}
    monkeypatch.setattr(methods, "TrainerRetrieval", lambda _, **given: started.update(given))
    made._init_dataloader()
    updater = started["updater"]
    given = updater.keywords
    assert updater.func is kind and given.get("objective") == objective
    assert (given["total_updates"], given["max_staleness"], given["seed"]) == (updates, staleness, 3)
    assert {name: given[name] for name in learning} == learning and given["compute_dtype"] == "auto"
    others = {"objective", "minibatch_size", "epochs", "max_staleness", "seed"}
    assert given.keys() - others <= inspect.signature(AdapterLearner).parameters.keys()


def test_a_correction_goes_into_one_policy_update_and_is_gone(tmp_path, monkeypatch):
    made = Trainer(tmp_path, bridge={"estimator": "two_state"})
    correction, entered = Correction([((1,), (2,))], [torch.zeros(1)], [0.5]), []

    @contextmanager
    def rows(batch, given, **sizes):
        entered.append((given, sizes))
        yield KVBatchMeta(partition_id="train", keys=["0", "1", "c0", "c1"], tags=[{}] * 4), 4

    monkeypatch.setattr(mixin, "correction_rows", rows)
    made._correction, metrics = correction, {}
    batch = KVBatchMeta(partition_id="train", keys=["0", "1"], tags=[{}] * 2)
    assert made._update_actor(batch, metrics) is batch
    # two rollouts a prompt: verl's mini-batch of one prompt holds the two further rows as a second one
    assert made.events == [("actor", ["0", "1", "c0", "c1"], 2)] and metrics == {"bridge/correction/rows": 2.0}
    sizes = {"loss_agg_mode": "token-mean", "mini_batch_rows": 2, "ranks": 1, "multiple": 2, "pad_token": 0}
    assert entered == [(correction, sizes)]
    assert made.config.actor_rollout_ref.actor.ppo_mini_batch_size == 1
    assert made._update_actor(batch, {}) is batch and made.events[-1] == ("actor", ["0", "1"], 1)


def test_a_resumed_run_loads_its_retriever(tmp_path):
    made = Trainer(tmp_path)
    made._load_checkpoint()
    assert made.events == [("load", str(tmp_path / "global_step_5" / "retriever"))]
    frozen = VerlBridgeConfig.from_mapping({"bridge": {"enable": True, "schedule": "frozen"}})
    for changes in ({"resumed_step": 0}, {"settings": VerlBridgeConfig()}, {"settings": frozen}):
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
    for without in ({"enable": False}, {"schedule": "frozen"}):
        plain = Trainer(tmp_path, bridge=without)
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


def test_the_retriever_starts_with_the_data_and_serving_ends_when_the_rest_cannot(tmp_path, monkeypatch):
    class Broken:
        total_training_steps = 4

        def init(self):
            self._init_dataloader()
            raise MemoryError("no room for the workers")

        def _init_dataloader(self):
            self.train_dataset = self.val_dataset = SimpleNamespace(dataframe=[])

    class BrokenTrainer(mixin.SearchTrainerMixin, Broken):
        verl_mode = "sync"
        parameter_sync_step = 1

        def __init__(self):
            self.settings = VerlBridgeConfig.from_mapping({"bridge": {"enable": True, "schedule": "rag_then_rl"}})
            self.config = OmegaConf.create({"data": {"seed": 3}})

    events, started = [], {}
    monkeypatch.setattr(methods, "TrainerRetrieval", lambda *_, **more: started.update(more) or Retrieval(events))
    made = BrokenTrainer()
    with pytest.raises(MemoryError, match="no room"):
        made.init()
    assert events == [("stop",)] and made.first_phase == 2
    assert started["updater"].keywords["total_updates"] == 2 and started["seed"] == 3 and started["worker"] == "shared"
    made.settings = VerlBridgeConfig.from_mapping({"bridge": {"enable": True, "schedule": "frozen"}})
    with pytest.raises(MemoryError, match="no room"):
        made.init()
    assert started["updater"] is None
