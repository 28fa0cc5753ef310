"""The trainer's hooks with verl, Ray and the models replaced: in which order things happen, and what stops a run."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from trainer_standins import Retrieval, Trainer, names, run_step
from transfer_queue import KVBatchMeta

from verl_bridge.bilevel.learner import AdapterLearner
from verl_bridge.bilevel.two_state import TwoStateUpdater
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.integrations import methods
from verl_bridge.integrations.retriever_step import Correction
from verl_bridge.integrations.verl import mixin


@pytest.fixture(autouse=True)
def no_workers(monkeypatch):
    monkeypatch.setattr(mixin, "answer_log_probs", lambda group, sequences, **_: [-torch.ones(1)] * len(sequences))


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
    chosen = {"likelihood_context": "prefix", "golds": "best", "length_normalize": True, "token_budget": 99}
    made = Trainer(tmp_path, bridge={**chosen, "gamma": 0.5, "tau_likelihood": 2.0, "micro_batch_tokens": 400})
    step = made._retriever_step()
    assert (step.prefix, step.all_golds, step.length_normalize, step.token_budget) == (True, True, True, 99)
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
    assert names(made) == ["fit", "stop"]
    made.events.clear()
    made.fails = ValueError("out of memory")
    with pytest.raises(ValueError, match="out of memory"):
        made.fit(None)
    assert names(made) == ["fit", "stop"]


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
