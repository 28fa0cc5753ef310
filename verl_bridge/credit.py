"""From traces to credit, for any host: the signals of a batch, its grounded advantages, its retrieval turns.

Hosts unpack their batch, call these, and repack; the maths is in :mod:`verl_bridge.algorithms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_bridge.algorithms.bridge import standardised_outcome
from verl_bridge.algorithms.gca import GCAResult, RoutingTable, grounded_advantages
from verl_bridge.algorithms.grounding import Groups, RolloutType, Segment, TurnTable, rollout_types, segment_map
from verl_bridge.algorithms.salience import token_salience
from verl_bridge.config.schema import GCAConfig
from verl_bridge.qa.answers import alias_hit
from verl_bridge.qa.signals import rollout_signals
from verl_bridge.trace import SearchTrace


@dataclass(frozen=True)
class BatchSignals:
    """What the traces of a batch say, ``(batch,)`` each; see :class:`~verl_bridge.qa.signals.Signals`."""

    hit: Tensor
    correct: Tensor
    yes_no: Tensor
    first_hit_turn: Tensor  # -1 without a hit
    types: Tensor


def batch_signals(
    traces: Sequence[SearchTrace],
    group_index: Tensor,
    *,
    oracle_hit: Tensor | None = None,
    oracle_known: Tensor | None = None,
    unicode: bool = False,
) -> BatchSignals:
    """Sub-outcomes and types of a batch of rollouts.

    Args:
        traces: one record per row.
        group_index: rows with one number share a prompt, ``(batch,)``.
        oracle_hit: what :func:`oracle_queries` found, ``(batch,)`` bool; None when the oracle is off.
        oracle_known: whether they were answered, ``(batch,)`` bool; everywhere when None.
        unicode: match aliases in the Unicode-aware way.
    """
    signals = [rollout_signals(trace, unicode=unicode) for trace in traces]
    hit, correct, answered, yes_no = (
        torch.tensor([getattr(s, name) for s in signals], dtype=torch.bool)
        for name in ("hit", "correct", "answered", "yes_no")
    )
    first = torch.tensor([s.first_hit_turn for s in signals], dtype=torch.int64)
    types = rollout_types(hit, correct, answered, group_index, oracle_hit=oracle_hit, oracle_known=oracle_known)
    return BatchSignals(hit, correct, yes_no, first, types)


def oracle_queries(
    traces: Sequence[SearchTrace], group_index: Tensor, *, unicode: bool = False
) -> dict[int, tuple[str, tuple[str, ...]]]:
    """What to ask for to learn whether evidence could have been found, by group: (question + gold, golds) [paper].

    Only for groups with a right answer without a hit and no hit in any rollout: elsewhere no type hangs on it.
    """
    hit, unsupported = set(), {}
    for trace, group in zip(traces, group_index.tolist(), strict=True):
        signals = rollout_signals(trace, unicode=unicode)
        if signals.hit:
            hit.add(group)
        elif signals.correct:
            unsupported[group] = (f"{trace.question} {trace.golden_answers[0]}", trace.golden_answers)
    return {group: asked for group, asked in unsupported.items() if group not in hit}


def oracle_hits(
    asked: Mapping[int, tuple[str, Sequence[str]]],
    answers: Sequence[Mapping[str, Any]],
    group_index: Tensor,
    *,
    unicode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Whether question and gold together find an alias, and whether that was answered, ``(batch,)`` bool each.

    Args:
        asked: what :func:`oracle_queries` gave.
        answers: one per query, in its order: ``status`` and ``documents`` with ``title`` and ``text``. A search that
            failed has answered nothing.
        group_index: ``(batch,)``.
        unicode: match aliases in the Unicode-aware way.
    """
    hits = {
        group: any(alias_hit(f"{d['title']} {d['text']}", golds, unicode=unicode) for d in answer["documents"])
        for (group, (_, golds)), answer in zip(asked.items(), answers, strict=True)
        if answer["status"] == "ok"
    }
    groups = group_index.tolist()
    hit, known = [hits.get(group, False) for group in groups], [group in hits for group in groups]
    return torch.tensor(hit, dtype=torch.bool), torch.tensor(known, dtype=torch.bool)


def ground(
    traces: Sequence[SearchTrace],
    signals: BatchSignals,
    advantages: Tensor,
    response_mask: Tensor,
    group_index: Tensor,
    rewards: Tensor,
    *,
    group_relative: bool,
    settings: GCAConfig,
    margin: Tensor | None = None,
    top_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
) -> GCAResult:
    """GCA on a batch: turns to segments, types to routes, advantages ``(batch, response)`` to grounded ones.

    Args:
        traces, signals: the records and what :func:`batch_signals` made of them.
        advantages, response_mask, group_index, rewards, group_relative: see
            :func:`~verl_bridge.algorithms.gca.grounded_advantages`.
        settings: ``verl_bridge.gca``.
        margin, top_entropy: the old policy's token statistics, ``(batch, response)``; needed by ``margin_entropy``.
        entropy: the old policy's entropy in nats, only for the metrics.

    Raises:
        ValueError: see :func:`~verl_bridge.algorithms.gca.grounded_advantages`, or no statistics where they are needed.
    """
    turns = TurnTable.of([trace.turns for trace in traces])
    segments = segment_map(turns, signals.first_hit_turn, response_mask)
    routing = RoutingTable(**settings.routing_rows(), merged=settings.merged_search)
    salience = None
    if settings.salience == "margin_entropy":
        if margin is None or top_entropy is None:
            raise ValueError(
                "verl_bridge.gca.salience=margin_entropy without the policy's margins and entropies: the engine gave "
                "none; set verl_bridge.gca.salience=uniform"
            )
        routed = routing.tensor(torch.float32, segments.device)[signals.types.long().unsqueeze(1), segments.long()]
        salience = token_salience(margin, top_entropy, segments, response_mask, routed.sign(), c_max=settings.c_max)
    result = grounded_advantages(
        advantages,
        response_mask,
        segments,
        signals.types,
        group_index,
        rewards,
        group_relative=group_relative,
        # a cap that the salience's type rounded up would be broken in a wider one
        salience=None if salience is None else salience.to(advantages.dtype).clamp(max=settings.c_max),
        gated_rows=signals.yes_no if settings.yes_no == "gate" else None,
        routing=routing,
        rho=settings.rho,
        scale=settings.s,
        kappa=settings.kappa,
        c_max=settings.c_max,
    )
    if entropy is not None:
        result.metrics.update(_segment_entropy(entropy, segments, response_mask))
    return result


def _segment_entropy(entropy: Tensor, segments: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Mean entropy of the sampled tokens of each segment, ``gca/entropy/*`` in nats; 0 where there are none."""
    codes = torch.where(response_mask.bool(), segments.long(), len(Segment)).flatten()
    sums = torch.zeros(len(Segment) + 1, dtype=torch.float64).index_add_(0, codes, entropy.flatten().double())
    counts = torch.bincount(codes, minlength=len(Segment) + 1).clamp(min=1)
    return {f"gca/entropy/{code.name}": value for code, value in zip(Segment, (sums / counts).tolist(), strict=False)}


def trajectory_advantages(
    base_estimator: str, advantages: Tensor, response_mask: Tensor, rewards: Tensor, group_index: Tensor
) -> Tensor:
    """A_i of BRIDGE's RL credit, ``(batch,)``: GRPO's advantage, or the standardised outcome for other bases [ours].

    GRPO gives every sampled token of a rollout the same advantage, so the first one's is the trajectory's. A group of
    one is standardised over the batch, and a group of equal rewards gets exactly 0 [ours]: verl's own leaves the first
    as it is and the second at the rounding error of its mean.
    """
    outcome = standardised_outcome(rewards, group_index)
    if base_estimator not in ("grpo", "grpo_vectorized"):
        return outcome
    sampled = response_mask.bool()
    first = sampled.to(torch.int64).argmax(dim=-1, keepdim=True)
    own = torch.where(sampled.any(dim=-1), advantages.gather(-1, first).squeeze(-1), 0.0)
    groups = Groups.of(group_index)
    says = (groups.sizes > 1) & ~groups.zero_variance(rewards)
    return torch.where(says[groups.row_group], own, outcome)


def rl_mask(
    signals: BatchSignals, group_index: Tensor, rewards: Tensor, *, group_relative: bool, settings: GCAConfig
) -> Tensor:
    """Rollouts whose reward says something about retrieval, ``(batch,)`` bool: not those GCA takes out of the loss.

    GCA takes none out of a gated group (yes/no golds, or equal rewards under a group-relative estimator), so all of
    such a group teach [ours]. Arguments as for :func:`ground`.
    """
    excluded = signals.types == RolloutType.D_NOT_RETRIEVABLE
    if not settings.enable:
        excluded = torch.zeros_like(excluded)
    if settings.yes_no == "gate":
        excluded = excluded & ~signals.yes_no
    if group_relative:
        groups = Groups.of(group_index)
        excluded = excluded & ~groups.zero_variance(rewards)[groups.row_group]
    return ~excluded


def search_metrics(traces: Sequence[SearchTrace]) -> dict[str, float]:
    """How the tool was used, ``search/*``, as shares of rollouts or of retrievals."""
    n = max(1, len(traces))
    searches = [turn for trace in traces for turn in trace.searches]
    made = max(1, sum(turn.status != "none" for turn in searches))
    turns = max(1, sum(len(trace.turns) for trace in traces))
    return {
        "search/per_rollout": len(searches) / n,
        "search/toolless_share": sum(not trace.searches for trace in traces) / n,
        "search/failed_share": sum(turn.status == "error" for turn in searches) / made,
        "search/malformed_turn_share": sum(t.kind == "malformed" for trace in traces for t in trace.turns) / turns,
        "search/answered_share": sum(trace.answer is not None for trace in traces) / n,
    }
