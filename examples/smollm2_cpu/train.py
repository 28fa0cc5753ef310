"""A few steps of bridge_gca with a real pretrained policy, SmolLM2-135M-Instruct, on a CPU; prints the step times.

python examples/smollm2_cpu/train.py [--steps 2] [--out runs/smollm2] [Hydra overrides …]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from convert import convert

from verl_bridge.embedded.assets import Assets, embedded_assets

# Two finished rollouts as turns of the chat: a model of this size follows examples, hardly a description. They have the
# three line breaks after </information> because an observation ends with two, as one token; in running text this
# tokenizer writes that token only where a third break follows, so the model would continue with one anyway.
EXAMPLES = (
    (
        "Who wrote the novel Dracula?",
        "<search> author of the novel Dracula </search>\n\n"
        "<information>Doc 1(Title: Dracula) Dracula is a Gothic novel of 1897 by Bram Stoker.\n</information>\n\n\n"
        "<answer> Bram Stoker </answer>",
    ),
    (
        "What is the highest mountain of Japan?",
        "<search> highest mountain of Japan </search>\n\n"
        "<information>Doc 1(Title: Mount Fuji) Mount Fuji is the highest mountain of Japan.\n</information>\n\n\n"
        "<answer> Mount Fuji </answer>",
    ),
)
PROMPT_TOKENS, RESPONSE_TOKENS = 224, 160
QUESTIONS, ROLLOUTS = 2, 4


def prompt(question: str) -> list[dict[str, str]]:
    """The question as a chat, after two finished rollouts."""
    turns = [{"role": "system", "content": "Search, then answer."}]
    for asked, rollout in EXAMPLES:
        turns.append({"role": "user", "content": f"Question: {asked}"})
        turns.append({"role": "assistant", "content": rollout})
    return [*turns, {"role": "user", "content": f"Question: {question}"}]


def write_questions(assets: Assets, folder: Path) -> Path:
    """64 of the embedded world's training questions that one search can answer, after the examples."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = parquet.read_table(assets.train_file).to_pylist()
    chosen = [row for row in rows if "_of_" not in row["extra_info"]["index"]][:64]
    for row in chosen:
        row["prompt"] = prompt(row["extra_info"]["question"])
    parquet.write_table(pa.Table.from_pylist(chosen), folder / "questions.parquet")
    return folder / "questions.parquet"


def overrides(assets: Assets, policy: Path, questions: Path, out: Path, steps: int) -> list[str]:
    """What the run sets beside the two keys; all else is verl's and ours."""
    actor, retriever = "actor_rollout_ref", "verl_bridge.retriever"
    settings = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": questions,
        "data.val_files": questions,
        "data.train_batch_size": QUESTIONS,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": RESPONSE_TOKENS,
        f"{actor}.model.path": policy,
        f"{actor}.actor.ppo_mini_batch_size": QUESTIONS,
        f"{actor}.actor.optim.lr": 1e-5,
        f"{actor}.actor.use_kl_loss": False,
        f"{actor}.actor.ppo_max_token_len_per_gpu": 2048,
        f"{actor}.rollout.log_prob_max_token_len_per_gpu": 2048,
        f"{actor}.rollout.n": ROLLOUTS,
        f"{actor}.rollout.max_model_len": PROMPT_TOKENS + RESPONSE_TOKENS,
        # Weights travel to the rollout through Ray's object store.
        "ray_kwargs.ray_init.object_store_memory": 1_500_000_000,
        "trainer.total_epochs": 1000,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.logger": "[console,file]",
        "trainer.default_local_dir": out / "checkpoints",
        "verl_bridge.run_dir": out,
        "verl_bridge.agent.max_turns": 2,
        "verl_bridge.agent.observation_tokens": 64,
        f"{retriever}.corpus": assets.corpus,
        f"{retriever}.index": assets.index,
        f"{retriever}.encoder": assets.encoder,
        f"{retriever}.shown": 1,
        f"{retriever}.top_k": 3,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    options, more = parser.parse_known_args()
    out = options.out.absolute()
    out.mkdir(parents=True)  # an earlier run's results are not written over
    policy, assets = convert(), embedded_assets()
    questions = write_questions(assets, out)
    command = [sys.executable, "-m", "verl_bridge.cli", "train", "+verl_bridge=bridge_gca", "+verl_bridge_host=cpu"]
    metrics = out / "metrics.jsonl"
    code = subprocess.call(
        [*command, f"hydra.run.dir={out / 'hydra'}", *overrides(assets, policy, questions, out, options.steps), *more],
        env={**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics), "HF_HUB_OFFLINE": "1"},
    )
    for line in metrics.read_text().splitlines() if code == 0 else []:
        record = json.loads(line)
        data = record["data"]
        parts = ", ".join(
            f"{name} {data[f'timing_s/{name}']:.1f}"
            for name in ("gen", "old_log_prob", "likelihood", "retriever_update", "update_actor")
            if f"timing_s/{name}" in data
        )
        print(
            f"step {record['step']}: {data['timing_s/step']:.1f} s ({parts}), tool-hit {data['grounding/tool_hit']:.2f}"
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
