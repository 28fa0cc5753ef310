"""The trainer's mixin over stand-ins of verl's trainer and of the run's retriever; each tells what it was asked."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl_bridge.bilevel.updater import UpdateResult
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.integrations import methods
from verl_bridge.integrations.rollout_batch import RolloutBatch
from verl_bridge.integrations.verl import mixin
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

    fails, steps = None, ()
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
        for step in self.steps:
            step()
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
    total_training_steps = 10
    _model_tokens = 2048

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
