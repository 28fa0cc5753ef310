"""Grounding: rollout types from sub-outcomes, segments of sampled tokens, and the metrics of both.

README.md beside this file has the definitions. [paper] is GCA (arXiv 2610.23148), [ours] a choice made here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class RolloutType(IntEnum):
    """Type of a rollout by retrieval hit H and correct answer C [paper]."""

    A = 0  # H=1, C=1
    B1 = 1  # H=1, C=0, answered
    B2 = 2  # H=1, C=0, no answer
    C = 3  # H=0, C=0
    D_RETRIEVABLE = 4  # H=0, C=1, and the evidence could have been found
    D_NOT_RETRIEVABLE = 5  # H=0, C=1, and nothing says that it could
    D_UNDETERMINED = 6  # H=0, C=1, alone in its group and no oracle query [ours]


class Segment(IntEnum):
    """Function of a sampled token [paper]."""

    NONE = 0
    VSEARCH = 1
    RSEARCH = 2
    ANS = 3


class TurnCode(IntEnum):
    """Kind of an assistant turn in a padded turn table."""

    PAD = 0
    SEARCH = 1
    ANSWER = 2
    MALFORMED = 3


_KINDS = {code.name.lower(): int(code) for code in TurnCode}


@dataclass(frozen=True)
class Groups:
    """Rollouts of one batch by prompt; rows outside ``row_mask`` (padding) belong to no statistic.

    Args:
        row_group: dense group number per row, ``(batch,)`` int64.
        row_mask: rows that count, ``(batch,)`` bool.
        sizes: counted rows per group, ``(groups,)`` int64.
    """

    row_group: Tensor
    row_mask: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, group_index: Tensor, row_mask: Tensor | None = None) -> Groups:
        """Groups by equal values of ``group_index`` ``(batch,)``, whatever the order of the rows."""
        if row_mask is None:
            row_mask = torch.ones_like(group_index, dtype=torch.bool)
        values, row_group = torch.unique(group_index, return_inverse=True)
        sizes = torch.zeros(len(values), dtype=torch.int64, device=group_index.device)
        return cls(row_group, row_mask, sizes.index_add_(0, row_group, row_mask.to(torch.int64)))

    def sum(self, values: Tensor) -> Tensor:
        """Sum of ``values`` ``(batch,)`` over the counted rows of each group, in float64. ``(groups,)``"""
        values = torch.where(self.row_mask, values.to(torch.float64), 0.0)
        return torch.zeros(len(self.sizes), dtype=torch.float64, device=values.device).index_add_(
            0, self.row_group, values
        )

    def any(self, values: Tensor) -> Tensor:
        """Whether any counted row of each group is true. ``(groups,)``"""
        return self.sum(values.bool()) > 0

    def zero_variance(self, rewards: Tensor) -> Tensor:
        """Groups of two or more whose counted rows all have exactly the same reward. ``(groups,)`` bool"""
        rewards = rewards.to(torch.float64)
        low = torch.full((len(self.sizes),), torch.inf, dtype=torch.float64, device=rewards.device)
        high = -low
        low.scatter_reduce_(0, self.row_group, torch.where(self.row_mask, rewards, torch.inf), "amin")
        high.scatter_reduce_(0, self.row_group, torch.where(self.row_mask, rewards, -torch.inf), "amax")
        return (low >= high) & (self.sizes > 1)

    def centred(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """``values`` less their group's mean ``(batch,)``, and σ with n-1, as verl's GRPO ``(groups,)``, in float64."""
        size = self.sizes.to(torch.float64).clamp(min=1)
        centred = values.to(torch.float64) - (self.sum(values) / size)[self.row_group]
        return centred, (self.sum(centred.square()) / (size - 1).clamp(min=1)).sqrt()


def index_groups(uids: Sequence[Hashable], device: torch.device | str | None = None) -> Tensor:
    """Integer group index ``(batch,)`` of uids: equal uids, equal number; positions do not matter."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64, device=device)


def rollout_types(
    hit: Tensor,
    correct: Tensor,
    answered: Tensor,
    group_index: Tensor,
    *,
    oracle_hit: Tensor | None = None,
    oracle_known: Tensor | None = None,
    row_mask: Tensor | None = None,
) -> Tensor:
    """Type of every rollout.

    Type D is retrievable when any rollout of its group has a hit, or the oracle query (question and gold answer) finds
    an alias [paper]. Alone in its group, the oracle decides if there is one, else D is undetermined [ours]. An oracle
    query that failed found neither something nor nothing: then only the group decides [ours].

    Args:
        hit, correct, answered: sub-outcomes, ``(batch,)`` bool.
        group_index: rows of one prompt share a number, ``(batch,)`` int64.
        oracle_hit: whether the oracle query retrieves an alias, ``(batch,)`` bool, None when it is off.
        oracle_known: whether the oracle query was answered, ``(batch,)`` bool; everywhere when None.
        row_mask: False for padding rows, ``(batch,)`` bool; these do not speak for their group.

    Returns:
        :class:`RolloutType` codes, ``(batch,)`` int8.

    Raises:
        ValueError: a rollout that is correct without an answer.
    """
    hit, correct, answered = hit.bool(), correct.bool(), answered.bool()
    if bool((correct & ~answered).any()):
        row = int((correct & ~answered).nonzero()[0])
        raise ValueError(f"rollout {row} is correct but not answered: the sub-outcomes come from different rollouts")
    groups = Groups.of(group_index, row_mask)
    retrievable = groups.any(hit)[groups.row_group]
    undetermined = groups.sizes[groups.row_group] < 2
    if oracle_hit is not None:
        known = torch.ones_like(hit) if oracle_known is None else oracle_known.bool()
        retrievable = retrievable | (oracle_hit.bool() & known)
        undetermined = undetermined & ~known
    types = torch.full(hit.shape, RolloutType.C, dtype=torch.int8, device=hit.device)
    unsupported = ~hit & correct
    for code, rows in (
        (RolloutType.A, hit & correct),
        (RolloutType.B1, hit & ~correct & answered),
        (RolloutType.B2, hit & ~correct & ~answered),
        (RolloutType.D_RETRIEVABLE, unsupported & retrievable),
        (RolloutType.D_NOT_RETRIEVABLE, unsupported & ~retrievable & ~undetermined),
        (RolloutType.D_UNDETERMINED, unsupported & ~retrievable & undetermined),
    ):
        types[rows] = code
    return types


@dataclass(frozen=True)
class TurnTable:
    """The assistant turns of a batch, padded to the most turns of a rollout, and a flat list of gated token spans.

    Args:
        starts, ends: half-open token spans of the turns in the response, ``(batch, turns)`` int64.
        kinds: :class:`TurnCode` codes, ``(batch, turns)`` int8; padding is ``PAD``.
        failed: the turn's retrieval failed, ``(batch, turns)`` bool.
        gate_rows, gate_starts, gate_ends: token spans of structural tags and control tokens, ``(gates,)`` int64.
    """

    starts: Tensor
    ends: Tensor
    kinds: Tensor
    failed: Tensor
    gate_rows: Tensor
    gate_starts: Tensor
    gate_ends: Tensor

    @classmethod
    def of(cls, rollouts: Sequence[Sequence[Any]], device: torch.device | str | None = None) -> TurnTable:
        """From the turns of each rollout: SearchTurn, or anything with its kind, span, status and tag_spans."""
        most = max(map(len, rollouts), default=0)
        rows: list[int] = []  # flat: many times faster into a tensor than nested lists
        gates: list[int] = []
        for row, turns in enumerate(rollouts):
            for turn in turns:
                rows += (*turn.span, _KINDS[turn.kind], turn.status == "error")
                for start, end in turn.tag_spans:
                    gates += (row, start, end)
            rows += [0] * (4 * (most - len(turns)))
        table = torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(rollouts), most, 4)
        gate_rows, gate_starts, gate_ends = torch.tensor(gates, dtype=torch.int64, device=device).reshape(-1, 3).T
        starts, ends, kinds, failed = table.unbind(dim=-1)
        return cls(starts, ends, kinds.to(torch.int8), failed.bool(), gate_rows, gate_starts, gate_ends)


def segment_map(turns: TurnTable, first_hit_turn: Tensor, response_mask: Tensor) -> Tensor:
    """Segment of every response token [paper]; a segment is the whole assistant turn, its reasoning included [ours].

    VSEARCH: searches up to and including the first hit turn. RSEARCH: later searches, every search of a rollout
    without a hit, malformed turns. ANS: the answer turn. NONE: tokens that were not sampled, gated tokens, and
    searches whose retrieval failed: the model is not to blame for those [ours].

    Args:
        turns: the turns of the batch; spans beyond the response are clipped.
        first_hit_turn: index into the turns of the first hit, -1 without a hit, ``(batch,)`` int64.
        response_mask: 1 on sampled tokens, ``(batch, response)``.

    Returns:
        :class:`Segment` codes, ``(batch, response)`` int8.

    Raises:
        ValueError: turns that overlap, or are not in order.
    """
    kinds = turns.kinds
    apart = (turns.starts[:, 1:] >= turns.ends[:, :-1]) | (kinds[:, 1:] == TurnCode.PAD)
    if not apart.all():
        row, turn = (~apart).nonzero()[0].tolist()
        raise ValueError(f"rollout {row}: turn {turn + 1} starts before turn {turn} ends; a token belongs to one turn")
    order = torch.arange(kinds.shape[1], device=kinds.device)
    useful = order <= first_hit_turn.unsqueeze(1)  # (batch, turns); no turn is <= -1
    codes = torch.zeros_like(kinds)
    codes[(kinds == TurnCode.MALFORMED) | ((kinds == TurnCode.SEARCH) & ~useful)] = Segment.RSEARCH
    codes[(kinds == TurnCode.SEARCH) & useful] = Segment.VSEARCH
    codes[kinds == TurnCode.ANSWER] = Segment.ANS
    codes[turns.failed] = Segment.NONE

    # One number per token, painted in one pass: the low two bits are the segment, the rest counts the gates over it.
    rows = torch.arange(len(kinds), device=kinds.device).repeat_interleave(kinds.shape[1])
    painted = _paint(
        torch.cat([rows, turns.gate_rows]),
        torch.cat([turns.starts.reshape(-1), turns.gate_starts]),
        torch.cat([turns.ends.reshape(-1), turns.gate_ends]),
        torch.cat([codes.reshape(-1).to(torch.int32), torch.full_like(turns.gate_rows, 4, dtype=torch.int32)]),
        response_mask.shape,
    )
    return painted.masked_fill((painted > 3) | ~response_mask.bool(), Segment.NONE).to(torch.int8)


def _paint(rows: Tensor, starts: Tensor, ends: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Sum of ``values`` over the spans that cover each token, ``(batch, response)`` int32; spans are clipped."""
    batch, length = shape
    edges = torch.zeros(batch, length + 1, dtype=torch.int32, device=rows.device)
    values = torch.where(ends > starts, values, 0)
    edges.index_put_((rows, starts.clamp(0, length)), values, accumulate=True)
    edges.index_put_((rows, ends.clamp(0, length)), -values, accumulate=True)
    return edges.cumsum_(dim=1)[:, :length]


def grounding_metrics(
    hit: Tensor,
    correct: Tensor,
    types: Tensor,
    group_index: Tensor,
    rewards: Tensor,
    *,
    outcome_advantages: Tensor | None = None,
    row_mask: Tensor | None = None,
) -> dict[str, float]:
    """Grounding of a batch of rollouts, shares in [0, 1], keys ``grounding/*``.

    ``delta`` is Pr[C|H=1] - Pr[C|H=0] averaged over the groups that hold both; ``identity_advantage`` the sum of the
    hit rollouts' advantages and ``identity_covariance`` n·Cov(H, R)/σ, both averaged over groups with reward variance:
    equal by the identity in README.md beside this file ("Identity"; σ with n-1, as verl's GRPO) when rewards are what
    the advantages came from, and otherwise not: with a KL penalty in the reward, or advantages that were not divided
    by σ.
    A share whose denominator is empty is 0.

    Args:
        hit, correct: sub-outcomes, ``(batch,)`` bool.
        types: :class:`RolloutType` codes, ``(batch,)``.
        group_index: ``(batch,)`` int64.
        rewards: outcome rewards, ``(batch,)``.
        outcome_advantages: one advantage per rollout, ``(batch,)``; standardised rewards when None.
        row_mask: False for padding rows, ``(batch,)`` bool.
    """
    groups = Groups.of(group_index, row_mask)
    rows, real = groups.row_mask, groups.sizes > 0
    hit, correct = hit.bool() & rows, correct.bool() & rows
    # of each group
    hit_count, correct_count, both_count = groups.sum(hit), groups.sum(correct), groups.sum(hit & correct)
    all_right, all_wrong = real & (correct_count == groups.sizes), real & (correct_count == 0)

    several, flat = groups.sizes > 1, groups.zero_variance(rewards)
    varied = several & ~flat
    centred, sigma = groups.centred(rewards)
    sigma = torch.where(varied, sigma, 1.0)
    if outcome_advantages is None:
        outcome_advantages = centred / sigma[groups.row_group]
    hit_advantage = groups.sum(torch.where(hit, outcome_advantages, 0.0))
    # n·Cov(H, R) = sum of H·(R - mean R)
    covariance = groups.sum(torch.where(hit, centred, 0.0)) / sigma

    split = (hit_count > 0) & (hit_count < groups.sizes)
    with_hit = both_count / hit_count.clamp(min=1)
    without = (correct_count - both_count) / (groups.sizes - hit_count).clamp(min=1)

    def share(part: Tensor, whole: Tensor) -> Tensor:
        return part.to(torch.float64).sum() / whole.to(torch.float64).sum().clamp(min=1)

    def mean(values: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, values, 0.0).sum() / where.sum().clamp(min=1)

    metrics = {f"type_share/{code.name}": share((types == code) & rows, rows) for code in RolloutType}
    metrics |= {
        "tool_hit": share(hit, rows),
        "em": share(correct, rows),
        "supcor": share(hit & correct, rows),
        "grounded_share": share(hit & correct, correct),
        "hitacc": share(hit & correct, hit),
        "hit_but_wrong": share(hit & ~correct, rows),
        "delta": mean(with_hit - without, split),
        "identity_advantage": mean(hit_advantage, varied),
        "identity_covariance": mean(covariance, varied),
        "groups": real.sum(),
        "groups_singleton": (groups.sizes == 1).sum(),
        "groups_all_right": all_right.sum(),
        "groups_all_wrong": all_wrong.sum(),
        "groups_mixed": (real & ~all_right & ~all_wrong).sum(),
        "groups_zero_variance_share": share(flat, several),
        "groups_zero_variance_all_right": (flat & all_right).sum(),
        "groups_zero_variance_all_wrong": (flat & all_wrong).sum(),
    }
    return figures("grounding", metrics)


def figures(prefix: str, values: dict[str, Tensor]) -> dict[str, float]:
    """Scalars on one device as floats by ``prefix/name``, in one transfer."""
    numbers = torch.stack([value.detach().to(torch.float64) for value in values.values()]).tolist()
    return {f"{prefix}/{name}": number for name, number in zip(values, numbers, strict=True)}
