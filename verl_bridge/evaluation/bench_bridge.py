"""``verl-bridge bench bridge``: what one update costs, BRIDGE beside a two-state rival on the same rollouts.

The two arms run in a process each, in turn, one at a time, so that the peak of a process is its arm's own. See
:mod:`verl_bridge.evaluation.bench_update` for what an update is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from verl_bridge.evaluation.bench_tokens import load_tokenizer, token_ratio
from verl_bridge.evaluation.bench_update import Arm, UpdateCost, UpdateSettings, Updating
from verl_bridge.evaluation.bench_world import WorldRollouts, world_rollouts

ARMS: tuple[Arm, Arm] = ("bridge", "two_state")
PAPER = {"time_ratio": 0.442, "memory_ratio": 0.503}  # 55.8% less time, 49.7% less peak memory
TOP_K = 10


def measure_bridge(
    *,
    corpus: Path,
    index: Path,
    policy: str,
    context: Literal["question", "prefix"] = "question",
    rollouts: int = 128,
    micro_batch_tokens: int = 4096,
    repeats: int = 5,
    threads: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time and memory of one update of both arms.

    Args:
        corpus, index: the embedded world's.
        policy: folder of the policy.
        context: ``bridge.likelihood_context``.
        rollouts: of one update, eight per question.
        micro_batch_tokens: tokens of one pass of the policy, padding included.
        repeats: updates of each arm whose time counts; one comes before, and one after, for the memory.
        threads: of torch, in each arm.
        seed: of the rollouts.
        say: told what goes on.

    Returns:
        the report of :func:`summarise`, and the size of what was measured.
    """
    prompt, tokenize = load_tokenizer(policy)
    batch = world_rollouts(corpus, index, prompt, tokenize, rollouts=rollouts, top_k=TOP_K, seed=seed)
    settings = UpdateSettings(corpus, index, policy, context, micro_batch_tokens, threads=threads)
    timed: dict[Arm, list[UpdateCost]] = {arm: [] for arm in ARMS}
    peaks: dict[Arm, dict[str, int]] = {}
    with ExitStack() as stack:
        pools = {
            arm: stack.enter_context(
                ProcessPoolExecutor(
                    1, mp_context=get_context("spawn"), initializer=_load, initargs=(arm, settings, batch)
                )
            )
            for arm in ARMS
        }
        # The first update makes the optimisers' moments and warms every cache; the last is for memory.
        for turn in range(repeats + 2):
            counts = "time" if 0 < turn <= repeats else "memory" if turn else ""
            for arm in ARMS if turn % 2 else reversed(ARMS):
                cost = pools[arm].submit(_run, counts == "memory").result()
                say(f"{arm}: {sum(cost.seconds.values()):.2f} s, {counts or 'nothing'} counts")
                if counts == "time":
                    timed[arm].append(cost)
                elif counts == "memory":
                    peaks[arm] = cost.peak_bytes
        about = {arm: pools[arm].submit(_about).result() for arm in ARMS}
    tokens = about["bridge"].pop("tokens")
    sizes = {
        "context": context,
        "rollouts": rollouts,
        "searches": len(batch.searches),
        "tokens_rolled_out": sum(map(len, batch.prompt_ids)) + sum(map(len, batch.response_ids)),
        "tokens_scored": tokens,
        "token_ratio": about["bridge"].pop("token_ratio"),
        "policy_parameters": about["bridge"]["policy_parameters"],
        "micro_batch_tokens": micro_batch_tokens,
        "repeats": repeats,
        "threads": threads,
    }
    loaded = {arm: about[arm]["loaded"] for arm in ARMS}
    return summarise(timed, peaks, loaded) | sizes


def summarise(
    timed: Mapping[Arm, Sequence[UpdateCost]], peaks: Mapping[Arm, Mapping[str, int]], loaded: Mapping[Arm, int]
) -> dict[str, Any]:
    """Ratios, bridge over two_state.

    Args:
        timed: per arm the updates whose time counts.
        peaks: per arm and part the bytes above the loaded models.
        loaded: resident bytes of each arm's process with its models loaded.

    Returns:
        ``time_ratio`` (of the medians; ``cpu_time_ratio`` of all threads' time, which other work on the machine
        disturbs less) and ``memory_ratio`` (of the peaks above the loaded models), the seconds and MiB they are of;
        the same with ``retriever_`` before it without the part ``policy``, which both arms have alike; each part's
        share of the median update's time, its peak, and the paper's ratios.
    """

    def median(arm: Arm, figures: str, without: str = "") -> float:
        sums = [sum(v for k, v in getattr(cost, figures).items() if k != without) for cost in timed[arm]]
        return statistics.median(sums)

    report: dict[str, Any] = {}
    for name, without in (("", ""), ("retriever_", "policy")):
        seconds = {arm: median(arm, "seconds", without) for arm in ARMS}
        cpu = {arm: median(arm, "cpu_seconds", without) for arm in ARMS}
        peak = {arm: max(value for part, value in peaks[arm].items() if part != without) / 2**20 for arm in ARMS}
        for figure, values in (("time", seconds), ("cpu_time", cpu), ("memory", peak)):
            report[f"{name}{figure}_ratio"] = values["bridge"] / values["two_state"]
        for arm in ARMS:
            report |= {f"{arm}_{name}seconds": seconds[arm], f"{arm}_{name}peak_mb": peak[arm]}
    for arm in ARMS:
        report[f"{arm}_process_peak_mb"] = report[f"{arm}_peak_mb"] + loaded[arm] / 2**20
        parts = {part: statistics.median(cost.seconds[part] for cost in timed[arm]) for part in peaks[arm]}
        report[f"{arm}_time_shares"] = {part: value / sum(parts.values()) for part, value in parts.items()}
        report[f"{arm}_part_peaks_mb"] = {part: value / 2**20 for part, value in peaks[arm].items()}
    return report | {"paper": dict(PAPER)}


# ---- in an arm's process ------------------------------------------------------------------------------------------

_updating: Updating | None = None


def _load(arm: Arm, settings: UpdateSettings, batch: WorldRollouts) -> None:
    global _updating
    _updating = Updating(arm, settings, batch)


def _run(exact_memory: bool) -> UpdateCost:
    return _updating.run(exact_memory)


def _about() -> dict[str, Any]:
    plan = _updating.plan
    return {
        "loaded": _updating.loaded,
        "policy_parameters": sum(parameter.numel() for parameter in _updating.policy.parameters()),
        "tokens": int(plan.metrics["tokens"]),
        "token_ratio": token_ratio(plan),
    }
