"""``verl-bridge demo``: one command from nothing to a trained search agent, with verl's own trainer on a plain machine.

The run happens in a hidden folder beside ``out`` that takes its name when the run is complete; a failed run leaves its
log there and says so.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_bridge.config.schema import ARMS
from verl_bridge.embedded.assets import Assets, custom_assets, embedded_assets

DEFAULT_STEPS = 16
TIMERS = ("gen", "old_log_prob", "likelihood", "retriever_update", "gca", "update_actor", "step")
PACKAGES = ("verl", "torch", "transformers", "tensordict", "ray", "peft", "faiss-cpu", "sentence-transformers")
POLL_SECONDS = 1.0
STOP_SECONDS = 20.0


class DemoError(RuntimeError):
    """The run could not be made or did not end well; the message says what to do."""


@dataclass(frozen=True)
class Sizes:
    """How much is trained and tested in one demo.

    Args:
        questions: questions per step.
        rollouts: rollouts per question.
        prompt_tokens, response_tokens: longest prompt and response.
        observation_tokens: tokens kept of one search result.
        validation: held-out questions asked before and after.
    """

    questions: int = 16
    rollouts: int = 8
    prompt_tokens: int = 96
    response_tokens: int = 768
    observation_tokens: int = 256
    validation: int = 400


EMBEDDED_SIZES = Sizes()
# Real articles are several times longer in the small policy's tokens than the embedded world's.
CUSTOM_SIZES = Sizes(questions=8, prompt_tokens=256, response_tokens=1536, observation_tokens=400, validation=64)


def run(
    arm: str = "bridge_gca",
    steps: int | None = None,
    seed: int = 0,
    out: str | os.PathLike | None = None,
    corpus: str | os.PathLike | None = None,
    questions: str | os.PathLike | None = None,
    sizes: Sizes | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train and test one arm; returns the content of ``summary.json``.

    Args:
        arm: ``baseline``, ``gca``, ``bridge`` or ``bridge_gca``.
        steps: policy updates, 16 by default.
        seed: of data order, sampling and adapter.
        out: folder of the results; it must not exist. ``runs/demo-ARM-seedSEED`` by default, with a number if taken.
        corpus, questions: train on these files instead of the embedded world; give both.
        sizes: how much is trained and tested; fitting the data by default.
        log: where progress goes.

    Raises:
        DemoError: bad arguments, or a run that failed.
        FileNotFoundError, ValueError: see :func:`~verl_bridge.embedded.assets.custom_assets`.
    """
    started = time.monotonic()
    steps = DEFAULT_STEPS if steps is None else steps
    if arm not in ARMS:
        raise DemoError(f"--arm {arm!r}: choose one of {', '.join(ARMS)}")
    if steps < 1:
        raise DemoError(f"--steps {steps}: train at least one step")
    if (corpus is None) != (questions is None):
        given, missing = ("--corpus", "--questions") if corpus else ("--questions", "--corpus")
        raise DemoError(f"{given} without {missing}: give both, or neither for the embedded world")
    target = (Path(out) if out else _free_folder(Path("runs"), f"demo-{arm}-seed{seed}")).absolute()
    if target.exists():
        raise DemoError(f"--out {target} exists already: choose another folder or remove it")
    if _running(target).exists():
        raise DemoError(
            f"--out {target}: {_running(target)} is there, of a run that is under way or that failed (see its "
            "train.log): choose another folder or remove it"
        )

    if corpus is None:
        assets, sizes = embedded_assets(log), sizes or EMBEDDED_SIZES
    else:
        assets, sizes = custom_assets(Path(corpus), Path(questions), log), sizes or CUSTOM_SIZES
    work = _running(target)
    work.mkdir(parents=True)
    ready = time.monotonic()
    hold_out(assets, sizes, work)
    log(f"training {arm} for {steps} steps (seed {seed}); log: {work / 'train.log'}")
    peak = _train(training_command(assets, sizes, arm, steps, seed, work), work, steps, log)
    summary = {
        **summarise(work / "metrics.jsonl", assets.data_source),
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "peak_rss_mb": round(peak / 2**20),
        "prepare_seconds": round(ready - started, 1),
        "total_seconds": round(time.monotonic() - started, 1),
        "versions": _versions(),
    }
    (work / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    shutil.rmtree(work / "hydra", ignore_errors=True)
    os.replace(work, target)
    log(table(summary))
    log(f"results: {target}")
    return summary


def _free_folder(parent: Path, name: str) -> Path:
    tries = (parent / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in tries if not folder.exists() and not _running(folder).exists())


def _running(target: Path) -> Path:
    """Where the files of a run are until it is complete."""
    return target.with_name(f".{target.name}.running")


def hold_out(assets: Assets, sizes: Sizes, work: Path) -> None:
    """Write the run's held-out questions: the same ones for every arm and seed."""
    import pyarrow.parquet as parquet

    questions = parquet.read_table(assets.validation_file)
    parquet.write_table(questions.slice(0, sizes.validation), work / "validation.parquet")


def training_command(assets: Assets, sizes: Sizes, arm: str, steps: int, seed: int, work: Path) -> list[str]:
    """verl's own entry point with the arm's one key, the CPU host and the demo's data; all the rest is verl's."""
    settings = {
        "hydra.run.dir": work / "hydra",
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "data.train_files": assets.train_file,
        "data.val_files": work / "validation.parquet",
        "data.train_batch_size": sizes.questions,
        "data.max_prompt_length": sizes.prompt_tokens,
        "data.max_response_length": sizes.response_tokens,
        "data.seed": seed,
        "actor_rollout_ref.model.path": assets.policy,
        "actor_rollout_ref.actor.ppo_mini_batch_size": sizes.questions // 2,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.rollout.n": sizes.rollouts,
        "actor_rollout_ref.rollout.max_model_len": sizes.prompt_tokens + sizes.response_tokens,
        "actor_rollout_ref.rollout.seed": seed,
        "trainer.total_epochs": 1000,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": True,
        "trainer.test_freq": steps,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": "[file]",
        "trainer.project_name": "verl_bridge",
        "trainer.experiment_name": f"demo_{arm}",
        "trainer.default_local_dir": work / "checkpoints",
        "verl_bridge.run_dir": work,
        "verl_bridge.retriever.encoder": assets.encoder,
        "verl_bridge.retriever.index": assets.index,
        "verl_bridge.retriever.corpus": assets.corpus,
        "verl_bridge.retriever.probe": assets.probe_file,
        "verl_bridge.agent.observation_tokens": sizes.observation_tokens,
        # The paper's 1e-5 is for 250 steps of 4,096 rollouts; a demo has 16 steps of 128.
        "verl_bridge.bridge.lr": 1e-4,
        "verl_bridge.bridge.minibatch_size": 64,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"+verl_bridge={arm}",
        "+verl_bridge_host=cpu",
        *overrides,
    ]


def _train(command: list[str], work: Path, steps: int, log: Callable[[str], None]) -> int:
    """Run the training to its end with a progress line per step; the peak memory of its processes in bytes."""
    from verl_bridge.launch import cpu_environment

    ray_folder = tempfile.mkdtemp(prefix="vbray")  # short: Ray's socket paths have a length limit
    environment = {
        **cpu_environment(),
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "VERL_FILE_LOGGER_PATH": str(work / "metrics.jsonl"),
        "RAY_TMPDIR": ray_folder,
    }
    peak, shown, started = 0, 0, time.monotonic()
    with open(work / "train.log", "wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=work, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                peak = max(peak, _tree_memory(process.pid))
                shown = _report(work / "metrics.jsonl", shown, steps, started, log)
            _report(work / "metrics.jsonl", shown, steps, started, log)
        finally:
            _stop(process)
            shutil.rmtree(ray_folder, ignore_errors=True)
    if process.returncode != 0:
        raise DemoError(
            f"training ended with code {process.returncode}: {_last_error(work / 'train.log')}\n"
            f"the whole log: {work / 'train.log'}"
        )
    return peak


def _records(path: Path) -> list[dict[str, Any]]:
    """The complete lines of verl's metrics file."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _report(path: Path, shown: int, steps: int, started: float, log: Callable[[str], None]) -> int:
    records = _records(path)
    for record in records[shown:]:
        data = record["data"]
        if record["step"] == 0:
            log(f"[{time.monotonic() - started:5.0f} s] held-out questions asked before training")
            continue
        left = (steps - record["step"]) * data["timing_s/step"]
        log(
            f"[{time.monotonic() - started:5.0f} s] step {record['step']:>3}/{steps}"
            f"  reward {data['critic/score/mean']:.2f}"
            f"  tool-hit {data['grounding/tool_hit']:.2f}"
            f"  grounded {data['grounding/grounded_share']:.2f}"
            f"  {data['timing_s/step']:.1f} s per step, {left:.0f} s left"
        )
        if data["search/toolless_share"] >= 0.9:
            log(
                f"WARNING: {data['search/toolless_share']:.0%} of the rollouts never called the search tool: "
                "check that the prompt asks for <search> tags and that the policy knows them"
            )
    return len(records)


def summarise(metrics: Path, data_source: str) -> dict[str, Any]:
    """Before, after and medians from verl's metrics file. Raises DemoError when a validation is missing."""
    records = _records(metrics)
    tested = [record["data"] for record in records if f"val-aux/{data_source}/em/mean@1" in record["data"]]
    if len(tested) < 2:
        raise DemoError(f"{metrics} holds {len(tested)} validations, two are needed: the run did not finish")
    summary: dict[str, Any] = {}
    for moment, data in (("start", tested[0]), ("end", tested[-1])):
        em, supported = (data[f"val-aux/{data_source}/{name}/mean@1"] for name in ("em", "supcor"))
        summary |= {
            f"em_{moment}": em,
            f"grounded_share_{moment}": supported / em if em else 0.0,
            f"tool_hit_{moment}": data[f"val-aux/{data_source}/tool_hit/mean@1"],
            f"format_{moment}": data[f"val-aux/{data_source}/format/mean@1"],
            f"recall_{moment}": data["val/retrieval/recall_shown"],
            f"recall_top_k_{moment}": data["val/retrieval/recall_top_k"],
        }
    trained = [record["data"] for record in records if record["step"] > 0]
    warm = trained[1:] or trained
    summary["step_seconds"] = {
        name: round(statistics.median(data.get(f"timing_s/{name}", 0.0) for data in warm), 3) for name in TIMERS
    }
    return summary


def table(summary: dict[str, Any]) -> str:
    """Before → after on the held-out questions, as text."""
    rows = (("EM", "em"), ("grounded share", "grounded_share"), ("tool-hit", "tool_hit"), ("recall@3", "recall"))
    lines = [f"{summary['arm']}, {summary['steps']} steps, held-out, greedy", f"{'':16}{'before':>8}{'after':>8}"]
    lines += [f"{name:16}{summary[f'{key}_start']:8.3f}{summary[f'{key}_end']:8.3f}" for name, key in rows]
    return "\n".join(lines)


def _tree_memory(pid: int) -> int:
    """Memory of a process and its descendants in bytes, pages that several share counted once."""
    import psutil

    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue  # it ended between the listing and the look
    except psutil.Error:
        pass
    return total


def _stop(process: subprocess.Popen) -> None:
    """End what we started, Ray's processes with it."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    for child in psutil.wait_procs(family, timeout=STOP_SECONDS if family else 0)[1]:
        child.kill()
    process.wait()


def _last_error(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line.strip() for line in lines if "Error:" in line or "ERROR" in line]
    return (named or [line.strip() for line in lines if line.strip()] or ["no output"])[-1][-600:]


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from verl_bridge import __version__

    return {"verl_bridge": __version__, "python": sys.version.split()[0], **{name: version(name) for name in PACKAGES}}
