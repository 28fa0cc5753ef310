"""GCA: bounded, sign-preserving residuals on token-level advantages (README.md beside this file).

[paper] is arXiv 2610.23148, [ours] a choice made here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_bridge.algorithms.grounding import Groups, RolloutType, Segment, figures

_SLACK = 1e-9  # a bound met exactly must not fail on the rounding of its factors
_CHUNK = 1 << 18  # tokens worked on at a time, so that temporaries stay in the cache
_COUNTS = (  # figures of each rollout
    "sampled",
    *(code.name for code in Segment if code),
    "active",
    "at_bound",
    "strength",
    "largest",
)
_ROWS = ("a", "b1", "b2", "c", "d_retrievable")
_TYPES = (RolloutType.A, RolloutType.B1, RolloutType.B2, RolloutType.C, RolloutType.D_RETRIEVABLE)  # of _ROWS


@dataclass(frozen=True)
class RoutingTable:
    """λ(type, segment): one ``(VSEARCH, RSEARCH, ANS)`` triple per type. Signs [paper], magnitudes [ours].

    Type D that is not retrievable leaves the policy loss, and D that is undetermined gets no residual: neither has a
    row. ``merged`` marks the ablation without the split of searches, :func:`merged_table`: both search entries of a row
    are then one number. It may be negative: it also stands for the searches that found nothing, and the rule that a
    search which found evidence is never blamed cannot be kept by a table that does not tell the two apart.

    Raises:
        ValueError: an entry that is not finite, a negative one for VSEARCH, or unequal search entries when merged.
    """

    a: tuple[float, float, float] = (0.5, -0.5, 0.5)
    b1: tuple[float, float, float] = (0.5, -0.5, -1.0)
    b2: tuple[float, float, float] = (0.5, -0.25, 0.0)
    c: tuple[float, float, float] = (0.0, 0.0, 0.0)
    d_retrievable: tuple[float, float, float] = (0.0, -0.25, -0.5)
    merged: bool = False

    def __post_init__(self) -> None:
        for name in _ROWS:
            row = getattr(self, name)
            if len(row) != 3 or not all(abs(value) < float("inf") for value in row):
                raise ValueError(f"routing.{name}={row} must be three finite numbers: VSEARCH, RSEARCH, ANS")
            if self.merged and row[0] != row[1]:
                raise ValueError(
                    f"routing.{name}: VSEARCH {row[0]} and RSEARCH {row[1]} must be equal when search is one segment"
                )
            if row[0] < 0 and not self.merged:
                raise ValueError(
                    f"routing.{name}: VSEARCH is {row[0]}, but the residual on a search that found evidence is "
                    "never negative; use 0 or more"
                )

    @property
    def largest(self) -> float:
        """λ_max, the largest magnitude in the table."""
        return max(abs(value) for name in _ROWS for value in getattr(self, name))

    def check_bound(self, *, rho: float, scale: float, kappa: float, c_max: float) -> None:
        """Raise ValueError unless ρ·s·λ_max·c_max ≤ κ < 1, which keeps the sign of every advantage [paper]."""
        for name, value in (("rho", rho), ("s", scale), ("c_max", c_max)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"gca.{name}={value} must be a number of at least 0")
        if not 0 < kappa < 1:
            raise ValueError(f"gca.kappa={kappa} must lie in (0, 1): a larger residual could turn an advantage's sign")
        strength = rho * scale * self.largest * c_max
        if strength > kappa + _SLACK:
            raise ValueError(
                f"gca: the bound rho*s*lambda_max*c_max <= kappa is broken: {rho:g}*{scale:g}*{self.largest:g}*"
                f"{c_max:g} = {strength:g} > {kappa:g}; lower rho, s, c_max or the largest entry of routing"
            )

    def tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The table by :class:`RolloutType` and :class:`Segment` codes, ``(types, segments)``."""
        table = torch.zeros(len(RolloutType), len(Segment), dtype=dtype)
        for code, name in zip(_TYPES, _ROWS, strict=True):
            table[code, 1:] = torch.tensor(getattr(self, name), dtype=dtype)
        return table.to(device)


def merged_table(tokens: Tensor, routing: RoutingTable | None = None) -> RoutingTable:
    """The table of the ablation with one search segment per type [paper], measured on saved rollouts.

    The sign is that of the token-weighted mean of the signed residuals, the magnitude the mean of the absolute ones.
    The residual meant is the additive one, |A|·ρ·λ·c, which has the sign of λ whatever the sign of A; ρ is common to
    all and c has the mean c̄ in every cell, so per token of |A| = 1 what remains is λ [ours]. Hence neither advantages
    nor salience are needed, and rollouts that are alone in their group serve as well. Types without a hit have
    only later-search tokens: their entry is RSEARCH. A type of which no token was seen gets 0.

    Args:
        tokens: sampled tokens by :class:`RolloutType` and :class:`Segment`, ``(types, segments)``.
        routing: the split table that is merged, the default one when None.
    """
    routing, seen = routing or RoutingTable(), tokens.tolist()
    rows = {}
    for code, name in zip(_TYPES, _ROWS, strict=True):
        useful, later, answer = getattr(routing, name)
        found, other = seen[code][Segment.VSEARCH], seen[code][Segment.RSEARCH]
        if code in (RolloutType.C, RolloutType.D_RETRIEVABLE):
            found, other = 0, 1
        signed, absolute = found * useful + other * later, found * abs(useful) + other * abs(later)
        sign = (signed > 0) - (signed < 0)
        search = sign * absolute / max(found + other, 1)
        rows[name] = (search, search, answer)
    return replace(routing, **rows, merged=True)


@dataclass(frozen=True)
class GCAResult:
    """Advantages with residuals.

    Args:
        advantages: ``(batch, response)``; equal bit for bit to the base wherever the residual is 0, except on rollouts
            that left the policy loss.
        metrics: ``gca/*`` figures of the batch.
    """

    advantages: Tensor
    metrics: dict[str, float]


def grounded_advantages(
    advantages: Tensor,
    response_mask: Tensor,
    segments: Tensor,
    types: Tensor,
    group_index: Tensor,
    rewards: Tensor,
    *,
    group_relative: bool,
    salience: Tensor | None = None,
    gated_rows: Tensor | None = None,
    row_mask: Tensor | None = None,
    routing: RoutingTable | None = None,
    rho: float = 0.2,
    scale: float = 1.0,
    kappa: float = 0.1,
    c_max: float = 0.5,
) -> GCAResult:
    """Ã = A·(1 + δ) with δ = sign(A)·ρ·s·λ(type, segment)·c [paper].

    So every token keeps the sign of its advantage and its clipping branch, and the additive term A·δ has the sign of
    λ: a positive λ on a negative advantage attenuates blame. Rollouts of type D that is not retrievable leave the
    policy loss: their advantages become 0, the response mask stays [ours]. With a group-relative estimator, groups of
    two or more with equal rewards keep the base advantage exactly [paper]; with a critic there is no such gate [ours].

    Args:
        advantages: base advantages A, ``(batch, response)``; anything, NaN included, where the mask is 0.
        response_mask: 1 on sampled tokens, ``(batch, response)``.
        segments: :class:`Segment` codes, ``(batch, response)``.
        types: :class:`RolloutType` codes, ``(batch,)``.
        group_index: rows of one prompt share a number, ``(batch,)`` int64.
        rewards: outcome rewards, ``(batch,)``.
        group_relative: whether the base estimator standardises over the group (GRPO, RLOO, ...).
        salience: c per token in [0, c_max], ``(batch, response)``; uniform c_max/2 when None.
        gated_rows: rollouts without residual and without leaving the loss (yes/no questions), ``(batch,)`` bool.
        row_mask: False for padding rows, which stay as they are, ``(batch,)`` bool.
        routing: λ, the default table when None.
        rho, scale, kappa, c_max: ρ, s, κ and the salience cap.

    Raises:
        ValueError: the bound ρ·s·λ_max·c_max ≤ κ < 1 is broken, or salience is outside [0, c_max] where it is used.
    """
    routing = routing or RoutingTable()
    routing.check_bound(rho=rho, scale=scale, kappa=kappa, c_max=c_max)
    groups = Groups.of(group_index, row_mask)
    untouched = ~groups.row_mask
    if gated_rows is not None:
        untouched = untouched | gated_rows.bool()
    flat = groups.zero_variance(rewards)
    if group_relative:
        untouched = untouched | flat[groups.row_group]
    excluded = (types == RolloutType.D_NOT_RETRIEVABLE) & ~untouched

    table = routing.tensor(advantages.dtype, advantages.device)
    weights = (table * (rho * scale))[types.long()].masked_fill(untouched.unsqueeze(1), 0.0)  # (batch, segments)
    if salience is None:
        weights = weights * (c_max / 2)

    grounded = torch.empty_like(advantages)
    counts: dict[str, list[Tensor]] = {name: [] for name in _COUNTS}
    size = max(1, _CHUNK // max(advantages.shape[1], 1))
    for start in range(0, len(advantages), size):
        part = slice(start, start + size)
        base, sampled = advantages[part], response_mask[part].bool()
        codes = segments[part].to(torch.int8) * sampled.view(torch.int8)  # NONE where nothing was sampled
        delta = base.sign() * weights[part].gather(1, codes.long())  # the sign of a NaN is 0
        if salience is not None:
            c = salience[part].where(delta != 0, 0.0)
            if not ((c >= 0) & (c <= c_max + _SLACK)).all():
                raise ValueError(f"salience lies outside [0, c_max={c_max:g}] on a token that it weighs")
            delta = delta * c
        torch.mul(base, 1 + delta, out=grounded[part])
        strength = delta.abs()
        found = (
            _count(sampled),
            *(_count(codes == code) for code in Segment if code),
            _count(delta != 0),
            _count(strength >= kappa * (1 - 1e-6)),
            strength.sum(dim=1),
            strength.amax(dim=1) if strength.shape[1] else strength.sum(dim=1),
        )
        for name, figure in zip(_COUNTS, found, strict=True):
            counts[name].append(figure)
    grounded[excluded] = grounded[excluded].masked_fill(response_mask[excluded].bool(), 0.0)
    of_rows = {
        name: torch.cat([rewards.new_zeros(0), *parts]).double() * groups.row_mask for name, parts in counts.items()
    }
    return GCAResult(grounded, _metrics(of_rows, advantages, response_mask, table, types, excluded, flat, groups))


def _count(where: Tensor) -> Tensor:
    """Trues of each row ``(rows,)``; as bytes, since summing bools takes three times as long."""
    return where.view(torch.int8).sum(dim=1, dtype=torch.int32)


def _metrics(
    of_rows: dict[str, Tensor],
    advantages: Tensor,
    response_mask: Tensor,
    table: Tensor,
    types: Tensor,
    excluded: Tensor,
    flat: Tensor,
    groups: Groups,
) -> dict[str, float]:
    """``gca/*``: shares of sampled tokens, of segments and counts of rollouts and groups; padding rows do not count.

    A conflict cell [paper] is a segment of a rollout whose own sub-outcome (the sign of λ) disagrees with the
    rollout's outcome (right or wrong): useful search in a wrong rollout, a redundant one in a right rollout, a right
    answer that bypassed evidence. ``conflict_cell_share`` is their share among the segments that hold tokens
    (``conflict_token_share``: among those segments' tokens), whether or not their advantage is 0 [ours].
    """
    sampled, active = of_rows["sampled"].sum(), of_rows["active"].sum()
    cells = torch.stack([of_rows[code.name] for code in Segment if code], dim=1)  # (batch, segments)
    # what is left to learn from in the groups that lost a rollout: few rows
    rest = (groups.any(excluded)[groups.row_group] & groups.row_mask & ~excluded).nonzero().squeeze(1)
    signs = advantages[rest].masked_fill(~response_mask[rest].bool(), 0.0)
    positive, negative = (torch.zeros_like(excluded).index_put((rest,), (x > 0).any(1)) for x in (signs, -signs))

    correct = (types == RolloutType.A) | (types >= RolloutType.D_RETRIEVABLE)
    route = table[types.long(), 1:].sign()
    conflict = torch.where(correct.unsqueeze(1), route < 0, route > 0)
    there, every = cells > 0, cells.sum().clamp(min=1)
    metrics = {
        "residual_mean": of_rows["strength"].sum() / active.clamp(min=1),
        "residual_max": of_rows["largest"].amax() if len(types) else active,
        "residual_at_bound_share": of_rows["at_bound"].sum() / active.clamp(min=1),
        "conflict_cell_share": (conflict & there).sum() / there.sum().clamp(min=1),
        "conflict_token_share": torch.where(conflict, cells, 0.0).sum() / every,
        "token_share/active": active / sampled.clamp(min=1),
        "token_share/NONE": (sampled - cells.sum()) / sampled.clamp(min=1),
        **{f"token_share/{code.name}": cells[:, code - 1].sum() / sampled.clamp(min=1) for code in Segment if code},
        "rollouts_left_loss": excluded.sum(),
        "groups_only_negative": (groups.any(negative) & ~groups.any(positive) & groups.any(excluded)).sum(),
        "groups_zero_variance": flat.sum(),
    }
    return figures("gca", metrics)
