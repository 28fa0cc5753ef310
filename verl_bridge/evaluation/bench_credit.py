"""``verl-bridge bench gca|salience``: what credit costs, beside what the host does anyway."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from verl_bridge.algorithms.gca import RoutingTable, grounded_advantages
from verl_bridge.algorithms.grounding import TurnTable, segment_map
from verl_bridge.algorithms.salience import token_salience, token_statistics
from verl_bridge.credit import BatchSignals, batch_signals
from verl_bridge.evaluation.memory import resident_bytes
from verl_bridge.trace import SearchTrace, SearchTurn

GroupEstimator = Callable[[Tensor, Tensor, Sequence[str]], Tensor]
"""Token-level rewards and response mask ``(batch, response)`` and uids to advantages ``(batch, response)``."""

GROUP = 8  # rollouts of one prompt
TAG = 3  # tokens of a structural tag


@dataclass(frozen=True)
class CreditBatch:
    """Made-up rollouts of a search agent, padded to one length.

    Args:
        traces: what happened.
        uids: rollouts of one prompt share one.
        group_index: the same as numbers, ``(batch,)``.
        response_mask: 1 on sampled tokens, ``(batch, response)`` int64 as verl has it.
        rewards: 1 for a right answer, ``(batch,)``.
        token_level_rewards: the same at the last sampled token, ``(batch, response)``.
    """

    traces: list[SearchTrace]
    uids: list[str]
    group_index: Tensor
    response_mask: Tensor
    rewards: Tensor
    token_level_rewards: Tensor


def synthetic_rollouts(rollouts: int, tokens: int, seed: int = 0) -> CreditBatch:
    """One to three searches and mostly an answer; about a fifth of the response is sampled, twice as much is read.

    About one search in three shows the gold, and half the answers are right, whether or not it was shown. Rollouts of
    one prompt read passages from the same six, as they do when they ask the same.

    Raises:
        ValueError: fewer than 80 tokens, which hold no such rollout.
    """
    if tokens < 80:
        raise ValueError(f"tokens={tokens}: the made-up rollouts need at least 80")
    draw = random.Random(seed)
    words = [f"w{draw.randrange(20_000)}" for _ in range(200_000)]
    turn, read = tokens // 10, tokens // 5  # sampled tokens of a turn, tokens of what is read after a search
    traces, uids = [], []
    mask = torch.zeros(rollouts, tokens, dtype=torch.int64)
    rewards = torch.zeros(rollouts)
    token_level_rewards = torch.zeros(rollouts, tokens)
    passages: list[str] = []
    for row in range(rollouts):
        gold = f"gold {row // GROUP}"
        if row % GROUP == 0:
            starts = [draw.randrange(len(words) - read) for _ in range(6)]
            passages = [" ".join(words[at : at + read * 3 // 4]) for at in starts]
            passages[:2] = [f"{passage} {gold}." for passage in passages[:2]]
        turns, position = [], 0
        for _ in range(draw.randint(1, 3)):
            span = (position, position + draw.randint(turn // 2, turn))
            position = span[1] + draw.randint(read // 2, read)
            mask[row, span[0] : span[1]] = 1
            tags = ((span[0], span[0] + TAG), (span[1] - TAG, span[1]))
            text = f"\n\n<information>Doc 1(Title: t) {draw.choice(passages)}</information>\n\n"
            ids, scores = ("1", "2", "3"), (0.9, 0.8, 0.7)
            turns.append(SearchTurn("search", span, tags, "q", "ok", ids, scores, 3, (span[1], position), text, 0))
        span = (position, position + draw.randint(turn // 2, turn))
        mask[row, span[0] : span[1]] = 1
        answered = draw.random() < 0.9
        answer = draw.choice((gold, "something else")) if answered else None
        turns.append(SearchTurn("answer" if answered else "malformed", span, ((span[0], span[0] + TAG),)))
        rewards[row] = answer == gold
        token_level_rewards[row, span[1] - 1] = rewards[row]
        stop = "answer" if answered else "no_action"
        traces.append(SearchTrace("q", (gold,), tuple(turns), answer, span if answered else None, stop, tokens))
        uids.append(f"prompt-{row // GROUP}")
    group_index = torch.arange(rollouts) // GROUP
    return CreditBatch(traces, uids, group_index, mask, rewards, token_level_rewards)


def measure_gca(
    reference: GroupEstimator,
    *,
    rollouts: int = 4096,
    tokens: int = 4096,
    repeats: int = 7,
    threads: int | None = 1,
    seed: int = 0,
) -> dict[str, float]:
    """Seconds of GCA's residual and of the host's own estimator on the same batch, in turn, the best of each.

    The residual is :func:`~verl_bridge.algorithms.gca.grounded_advantages` from ready segment ids with uniform
    salience, metrics included. What comes before it is timed beside: alias matching (once, for a second time would
    find it cached), segmentation from the traces, and the salience from statistics that are already there.

    Args:
        reference: the host's group estimator: ``grpo_advantages`` of
            :mod:`verl_bridge.integrations.verl.reference_advantage`.
        rollouts, tokens: size of the batch.
        repeats: runs of each.
        threads: of torch, one as in a run on the CPU; as it is when None.
        seed: of the batch.

    Returns:
        ``gca_seconds``, ``grpo_seconds``, their ``ratio``, ``alias_matching_seconds``, ``segmentation_seconds``,
        ``salience_seconds``, and the size of what was measured.
    """
    with _threads(threads):
        batch = synthetic_rollouts(rollouts, tokens, seed)
        start = time.perf_counter()
        signals = batch_signals(batch.traces, batch.group_index)
        alias_matching = time.perf_counter() - start
        segments = _segments(batch, signals)
        advantages = reference(batch.token_level_rewards, batch.response_mask, batch.uids)

        def residual() -> None:
            grounded_advantages(
                advantages,
                batch.response_mask,
                segments,
                signals.types,
                batch.group_index,
                batch.rewards,
                group_relative=True,
            )

        def host() -> None:
            reference(batch.token_level_rewards, batch.response_mask, batch.uids)

        generator = torch.Generator().manual_seed(seed)
        margin = torch.randn(rollouts, tokens, generator=generator)
        entropy = torch.rand(rollouts, tokens, generator=generator)

        def salience() -> None:
            signs = RoutingTable().tensor(torch.float32, margin.device).sign()[signals.types.long()]
            signs = signs.gather(1, segments.long())
            token_salience(margin, entropy, segments, batch.response_mask, signs)

        gca_seconds, grpo_seconds = _best(repeats, residual, host)
        segmentation, salience_seconds = _best(min(repeats, 3), lambda: _segments(batch, signals), salience)
        return {
            "gca_seconds": gca_seconds,
            "grpo_seconds": grpo_seconds,
            "ratio": gca_seconds / grpo_seconds,
            "alias_matching_seconds": alias_matching,
            "segmentation_seconds": segmentation,
            "salience_seconds": salience_seconds,
            "rollouts": rollouts,
            "tokens": tokens,
            "sampled_share": float(batch.response_mask.double().mean()),
            "threads": torch.get_num_threads(),
        }


def _segments(batch: CreditBatch, signals: BatchSignals) -> Tensor:
    turns = TurnTable.of([trace.turns for trace in batch.traces])
    return segment_map(turns, signals.first_hit_turn, batch.response_mask)


def measure_salience(
    *,
    tokens: int = 256,
    vocabulary: int = 151_936,
    repeats: int = 7,
    threads: int | None = 1,
    seed: int = 0,
) -> dict[str, float]:
    """What margin and entropy add to a log-prob and entropy pass over the same float32 logits on the CPU.

    The pass by itself and the pass with the statistics run in turn; the best of each counts. The extra memory is what
    only the statistics add, in a new process, from its resident memory with the logits to its peak (Linux's ``VmHWM``).

    Args:
        tokens, vocabulary: size of the logits.
        repeats: runs of each.
        threads: of torch, one as in a run on the CPU; as it is when None.
        seed: of the logits.

    Returns:
        ``base_seconds``, ``with_seconds``, ``overhead`` (their quotient less 1), ``extra_bytes``, and the size of what
        was measured.
    """
    with _threads(threads):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            extra_bytes = pool.submit(_peak_of_statistics, tokens, vocabulary, torch.get_num_threads()).result()
        logits, labels = _logits(tokens, vocabulary, seed)

        def with_statistics() -> None:
            log_prob_and_entropy(logits, labels)
            token_statistics(logits, labels)

        base_seconds, with_seconds = _best(repeats, lambda: log_prob_and_entropy(logits, labels), with_statistics)
        return {
            "base_seconds": base_seconds,
            "with_seconds": with_seconds,
            "overhead": with_seconds / base_seconds - 1,
            "extra_bytes": extra_bytes,
            "tokens": tokens,
            "vocabulary": vocabulary,
            "threads": torch.get_num_threads(),
        }


def log_prob_and_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The pass of the CPU engine: log-probability of the labels and entropy, ``(tokens,)`` each."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs.gather(-1, labels[:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def _logits(tokens: int, vocabulary: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.empty(tokens, vocabulary).normal_(0.0, 2.0, generator=generator)
    return logits, torch.randint(0, vocabulary, (tokens,), generator=generator)


def _peak_of_statistics(tokens: int, vocabulary: int, threads: int) -> int:
    torch.set_num_threads(threads)
    logits, labels = _logits(tokens, vocabulary, 0)
    before = resident_bytes("VmRSS")
    token_statistics(logits, labels)
    # Not ru_maxrss: that begins with the peak of the process that started this one.
    return resident_bytes("VmHWM") - before


def _best(repeats: int, *works: Callable[[], None]) -> list[float]:
    """Seconds of each work, the best of ``repeats`` runs that take turns."""
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
