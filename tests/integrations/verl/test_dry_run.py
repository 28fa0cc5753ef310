"""A dry run: it refuses what a run would refuse, lists what is missing, and starts nothing."""

from __future__ import annotations

import json
from functools import cache

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import ray
from hydra.errors import HydraException
from omegaconf import OmegaConf

from verl_bridge.config.schema import ConfigError
from verl_bridge.config.search_r1 import REPLACED
from verl_bridge.integrations.verl.dry_run import compose_run, examine, main

RUN = (
    "algorithm.adv_estimator=grpo",
    "critic.enable=false",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B",
    "actor_rollout_ref.rollout.name=vllm",
    "+verl_bridge=baseline",
)


@cache
def _base():
    return compose_run(RUN)


@pytest.fixture
def config(tmp_path):
    """A config that nothing is wrong with: data of one row, a corpus of two documents and their index."""
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "Q?"}],
        "reward_model": {"ground_truth": {"target": ["Lima"]}},
    }
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "q.parquet")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"id": i, "contents": f"t\n{i}"}) + "\n" for i in range(2)))
    index = faiss.IndexFlatIP(4)
    index.add(np.eye(2, 4, dtype="float32"))
    faiss.write_index(index, str(tmp_path / "i.index"))
    changes = {
        "data": {"train_files": str(tmp_path / "q.parquet"), "val_files": [str(tmp_path / "q.parquet")]},
        "verl_bridge": {
            "retriever": {
                "corpus": str(tmp_path / "c.jsonl"),
                "index": str(tmp_path / "i.index"),
                "encoder": "intfloat/e5-base-v2",
                "family": "e5",
            }
        },
    }
    return OmegaConf.merge(_base(), changes)


def test_a_run_that_can_start(config):
    found = examine(config)
    assert found.missing == [] and not ray.is_initialized()
    assert found.figures["policy"] == "Qwen/Qwen2.5-3B, 1 × 8 GPUs"
    assert found.figures["batch"] == "1024 questions × 1 rollouts = 1024; 4 policy updates per step"
    assert (found.figures["GCA"], found.figures["BRIDGE"]) == ("off", "off")
    assert "s per step (a formula" in found.figures["estimate"]  # of how many steps nobody has said
    assert "A100" in found.table() and "MISSING" not in found.table()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.val_files", ["nowhere/q.parquet"]),
        ("actor_rollout_ref.model.path", "/nowhere/model"),
        ("verl_bridge.retriever.corpus", "nowhere/c.jsonl"),
        ("verl_bridge.retriever.index", "nowhere/i"),
        ("verl_bridge.retriever.probe", "nowhere/p.jsonl"),
        ("verl_bridge.retriever.encoder", "/nowhere/encoder"),
    ],
)
def test_a_missing_file_is_listed_and_the_rest_still_looked_at(config, key, value):
    OmegaConf.update(config, key, value)
    found = examine(config)
    (missing,) = found.missing
    assert missing.startswith(f"{key}=") and "nowhere" in missing
    assert f"MISSING      {missing}" in found.table()


def test_a_server_that_is_not_up_is_missing(config):
    OmegaConf.update(config, "verl_bridge.retriever.url", "http://127.0.0.1:9")
    OmegaConf.update(config, "verl_bridge.retriever.deadline", 0.5)
    (missing,) = examine(config).missing
    assert missing.startswith("verl_bridge.retriever.url='http://127.0.0.1:9'")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("verl_bridge.gca.rho", 9.0, "the bound"),
        ("verl_bridge.retriever.top_k", 2, "is below verl_bridge.retriever.shown=3"),
        ("trainer.v1.trainer_mode", "sync", "verl's own trainer"),
        ("trainer.v1.trainer_mode", "bridge_async", "Unknown trainer"),
        ("actor_rollout_ref.actor.use_dynamic_bsz", False, "ppo_micro_batch_size"),
        ("actor_rollout_ref.rollout.agent.default_agent_loop", "tool_agent", "writes no search traces"),
    ],
)
def test_what_a_run_refuses_is_refused(config, key, value, says):
    OmegaConf.update(config, key, value)
    with pytest.raises((ValueError, HydraException), match=says):
        examine(config)


@pytest.mark.parametrize("key", ["actor.ppo_micro_batch_size", "rollout.log_prob_micro_batch_size"])
def test_the_keys_of_micro_batches_that_workers_do_not_go_by_are_refused(config, key):
    """verl's own checks let them pass; its workers stop at them with a bare AssertionError."""
    changes = {"actor_rollout_ref.actor.use_dynamic_bsz": False}
    for name in ("actor.ppo_micro_batch_size", "rollout.log_prob_micro_batch_size"):
        changes[f"actor_rollout_ref.{name}" if name == key else f"actor_rollout_ref.{name}_per_gpu"] = 8
    for name, value in changes.items():
        OmegaConf.update(config, name, value)
    with pytest.raises(ConfigError, match=rf"actor_rollout_ref.{key}_per_gpu is not set.* do not go by {key}"):
        examine(config)


def test_micro_batches_of_a_fixed_number_of_rows(config):
    """8 rows of 512 + 512 tokens are the 8,192 tokens that the dynamic batch is set to."""
    for key, value in (
        ("data.max_prompt_length", 512),
        ("data.max_response_length", 512),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.01),  # else what serves is the most
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 8192),
    ):
        OmegaConf.update(config, key, value)
    dynamic = examine(config).figures["estimate"]
    OmegaConf.update(config, "actor_rollout_ref.actor.use_dynamic_bsz", False)
    for rows, same in ((8, True), (64, False)):
        OmegaConf.update(config, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", rows)
        OmegaConf.update(config, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", rows)
        assert (examine(config).figures["estimate"] == dynamic) == same


def test_another_engine_has_no_estimate():
    paths = ("corpus=c", "index=i", "encoder=intfloat/e5-base-v2")
    found = examine(compose_run([*RUN, "model_engine=megatron", *(f"verl_bridge.retriever.{path}" for path in paths)]))
    assert found.figures["estimate"] == "none: the formula is of FSDP, and actor_rollout_ref.actor.strategy=megatron"


def test_a_retriever_that_never_learns_is_said_to(config):
    plain = examine(config).figures["estimate"]
    OmegaConf.update(config, "verl_bridge.bridge.enable", True)
    assert examine(config).figures["estimate"] != plain
    OmegaConf.update(config, "verl_bridge.bridge.schedule", "frozen")
    found = examine(config).figures
    assert (found["BRIDGE"], found["estimate"]) == ("schedule frozen: no retriever learns", plain)


def test_rows_that_are_there_are_read(config, tmp_path):
    rows = [{"reward_model": {"ground_truth": {"target": golds}}} for golds in (["Lima"], [])]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    config.data.val_files = str(tmp_path / "bad.parquet")
    with pytest.raises(ConfigError, match=r"data.val_files: row 2 has gold answers \[\]"):
        examine(config)


def test_verl_without_us_has_a_dry_run_too():
    found = examine(compose_run([*RUN[:-1], "data.train_files=nowhere.parquet", "data.val_files=null"]))
    assert found.missing == ["data.train_files='nowhere.parquet'"]
    assert "GCA" not in found.figures and found.figures["trainer"] == "trainer.v1.trainer_mode=sync"


def test_main_says_what_and_exits(capsys, tmp_path):
    assert main([*RUN, "verl_bridge.retriever.corpus=c", "verl_bridge.retriever.index=i"]) == 1
    assert "MISSING      verl_bridge.retriever.corpus='c'" in capsys.readouterr().out
    for arguments, says in (
        ([*RUN, "--multirun"], "--multirun: a dry run takes overrides"),
        (["--config-dir", str(tmp_path / "nowhere")], "does not exist"),
        ([*RUN, "data.trian_files=x"], "trian_files"),
        (["+verl_bridge=brigde"], "brigde"),
        ([*RUN], "verl_bridge.retriever.index is not set"),
    ):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and says in err


def test_every_key_of_search_r1_is_explained_at_once(capsys):
    old = [f"{key}=1" for key in REPLACED]
    assert main([*RUN, *old]) == 2
    hints = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Search-R1's key ")]
    assert len(hints) == len(REPLACED) == 14


def test_a_folder_of_recipes_may_also_hold_groups_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/small.yaml").write_text("# @package _global_\ndata:\n  train_batch_size: 3\n")
    assert compose_run(["--config-dir", str(tmp_path), "+mine=small"]).data.train_batch_size == 3
