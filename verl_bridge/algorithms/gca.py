"""GCA: bounded, sign-preserving residuals on token-level advantages (METHODS §1.4, §1.5).

[paper] is arXiv 2610.23148, [ours] a choice made here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl_bridge.algorithms.grounding import Groups, RolloutType, Segment

_SLACK = 1e-9  # a bound met exactly must not fail on the rounding of its factors


@dataclass(frozen=True)
class RoutingTable:
    """λ(type, segment): one ``(VSEARCH, RSEARCH, ANS)`` triple a type. Signs [paper], magnitudes [ours].

    Type D that is not retrievable leaves the policy loss, and D that is undetermined gets no residual: neither has a
    row. Raises ValueError for an entry that is not finite, or a negative one for VSEARCH.
    """

    a: tuple[float, float, float] = (0.5, -0.5, 0.5)
    b1: tuple[float, float, float] = (0.5, -0.5, -1.0)
    b2: tuple[float, float, float] = (0.5, -0.25, 0.0)
    c: tuple[float, float, float] = (0.0, 0.0, 0.0)
    d_retrievable: tuple[float, float, float] = (0.0, -0.25, -0.5)

    def __post_init__(self) -> None:
        for field in fields(self):
            row = getattr(self, field.name)
            if len(row) != 3 or not all(abs(value) < float("inf") for value in row):
                raise ValueError(f"routing.{field.name}={row} must be three finite numbers: VSEARCH, RSEARCH, ANS")
            if row[0] < 0:
                raise ValueError(
                    f"routing.{field.name}: VSEARCH is {row[0]}, but the residual on a search that found evidence is "
                    "never negative; use 0 or more"
                )

    @property
    def largest(self) -> float:
        """λ_max, the largest magnitude in the table."""
        return max(abs(value) for field in fields(self) for value in getattr(self, field.name))

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
        rows = (RolloutType.A, RolloutType.B1, RolloutType.B2, RolloutType.C, RolloutType.D_RETRIEVABLE)
        for code, field in zip(rows, fields(self), strict=True):
            table[code, 1:] = torch.tensor(getattr(self, field.name), dtype=dtype)
        return table.to(device)


@dataclass(frozen=True)
class GCAResult:
    """Advantages with residuals.

    Args:
        advantages: ``(batch, response)``; equal bit for bit to the base wherever ``residual`` is 0, except on
            rollouts that left the policy loss.
        residual: δ, the relative change of the advantage, in [-κ, κ], ``(batch, response)``.
        metrics: ``gca/*`` figures of the batch.
    """

    advantages: Tensor
    residual: Tensor
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
    flat = groups.zero_variance(rewards) & (groups.sizes > 1)
    if group_relative:
        untouched = untouched | flat[groups.row_group]

    sampled = response_mask.bool()
    table = routing.tensor(advantages.dtype, advantages.device)
    routed = table[types.long().unsqueeze(1), segments.long()]  # λ, (batch, response)
    active = sampled & (routed != 0) & ~untouched.unsqueeze(1)
    if salience is None:
        salience = torch.full((), c_max / 2, dtype=advantages.dtype, device=advantages.device)
    elif not bool(((salience >= 0) & (salience <= c_max + _SLACK))[active].all()):
        raise ValueError(f"salience lies outside [0, c_max={c_max:g}] on a token that it weighs")
    residual = torch.where(active, advantages.sign() * (rho * scale) * routed * salience, 0.0)
    grounded = torch.where(active, advantages * (1 + residual), advantages)
    left = (types == RolloutType.D_NOT_RETRIEVABLE) & ~untouched
    grounded = torch.where(left.unsqueeze(1) & sampled, 0.0, grounded)

    metrics = _metrics(grounded, residual, active, sampled, segments, left, flat, groups)
    return GCAResult(grounded, residual, metrics)


def _metrics(
    grounded: Tensor,
    residual: Tensor,
    active: Tensor,
    sampled: Tensor,
    segments: Tensor,
    left: Tensor,
    flat: Tensor,
    groups: Groups,
) -> dict[str, float]:
    sampled = sampled & groups.row_mask.unsqueeze(1)
    tokens, strength = sampled.sum().clamp(min=1), residual.abs()
    positive, negative = ((sampled & part).any(dim=1) for part in (grounded > 0, grounded < 0))
    only_negative = groups.any(negative) & ~groups.any(positive) & groups.any(left)
    metrics = {
        "residual_mean": strength.sum() / active.sum().clamp(min=1),
        "residual_max": strength.max() if strength.numel() else strength.sum(),
        "token_share/active": active.sum() / tokens,
        "token_share/strengthened": (residual > 0).sum() / tokens,
        "token_share/attenuated": (residual < 0).sum() / tokens,
        **{f"token_share/{code.name}": (sampled & (segments == code)).sum() / tokens for code in Segment},
        "rollouts_left_loss": left.sum(),
        "groups_only_negative": only_negative.sum(),
        "groups_zero_variance": flat.sum(),
    }
    values = torch.stack([value.to(torch.float64) for value in metrics.values()]).tolist()  # one transfer
    return {f"gca/{key}": value for key, value in zip(metrics, values, strict=True)}
