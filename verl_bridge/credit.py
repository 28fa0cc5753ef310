"""From traces to credit, for any host: the signals of a batch, its grounded advantages, its retrieval turns.

Hosts unpack their batch, call these, and repack; the maths is in :mod:`verl_bridge.algorithms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_bridge.algorithms.bridge import standardised_outcome
from verl_bridge.algorithms.gca import GCAResult, RoutingTable, grounded_advantages
from verl_bridge.algorithms.grounding import Groups, RolloutType, TurnTable, rollout_types, segment_map
from verl_bridge.config.schema import GCAConfig
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


def batch_signals(traces: Sequence[SearchTrace], group_index: Tensor) -> BatchSignals:
    """Sub-outcomes and types of a batch of rollouts; rows with one number in ``group_index`` share a prompt."""
    signals = [rollout_signals(trace) for trace in traces]
    hit, correct, answered, yes_no = (
        torch.tensor([getattr(s, name) for s in signals], dtype=torch.bool)
        for name in ("hit", "correct", "answered", "yes_no")
    )
    first = torch.tensor([-1 if s.first_hit_turn is None else s.first_hit_turn for s in signals], dtype=torch.int64)
    return BatchSignals(hit, correct, yes_no, first, rollout_types(hit, correct, answered, group_index))


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
) -> GCAResult:
    """GCA on a batch: turns to segments, types to routes, advantages ``(batch, response)`` to grounded ones.

    Raises:
        ValueError: see :func:`~verl_bridge.algorithms.gca.grounded_advantages`.
    """
    turns = TurnTable.of([trace.turns for trace in traces])
    segments = segment_map(turns, signals.first_hit_turn, response_mask)
    return grounded_advantages(
        advantages,
        response_mask,
        segments,
        signals.types,
        group_index,
        rewards,
        group_relative=group_relative,
        gated_rows=signals.yes_no if settings.yes_no == "gate" else None,
        routing=RoutingTable(**settings.routing_rows()),
        rho=settings.rho,
        scale=settings.s,
        kappa=settings.kappa,
        c_max=settings.c_max,
    )


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


def teaches_by_reward(signals: BatchSignals, settings: GCAConfig) -> Tensor:
    """Rollouts whose reward says something about retrieval, ``(batch,)`` bool: not those GCA takes out of the loss."""
    if not settings.enable:
        return torch.ones_like(signals.hit)
    left = signals.types == RolloutType.D_NOT_RETRIEVABLE
    return ~(left & ~signals.yes_no) if settings.yes_no == "gate" else ~left


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
