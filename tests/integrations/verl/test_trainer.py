"""The trainer's hooks with verl, Ray and the models replaced: in which order things happen, and what stops a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl_bridge import credit
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

    def stop(self):
        self.events.append(("stop",))


class Verl:
    """What the mixin calls of verl's trainer."""

    fails = None

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
        response_mask=torch.ones(2, 4),
        advantages=torch.tensor([[0.7] * 4, [-0.7] * 4]),
        rewards=torch.tensor([1.0, 0.0]),
        group_index=torch.tensor([0, 0]),
        columns={},
    )


def update(made):
    batch = rollouts()
    return made._update_retriever(batch, credit.batch_signals(batch.traces, batch.group_index))


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
    assert made.events[3] == ("publish", False)
    assert {"likelihood", "retriever_update", "publish_adapter"} == set(made.timing_raw)


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
