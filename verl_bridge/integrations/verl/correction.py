"""``estimator: two_state``: the correction terms of the policy gradient, as further rows of verl's policy update.

The penalised problem's policy gradient adds γ·∇_θ[G(θ,η_γ) − G(θ,η*)] to that of F [paper]. With
G = −mean over turns of log Σ_d p_η(d|q)·exp(ℓ_d/τ_l) its descent direction is (γ/τ_l)·mean Σ_d e_d·∇_θ ℓ_d, where
e_d = post_d(η_γ) − post_d(η*), and ℓ_d is the log-probability of an answer: a sum of c_s·Σ_t ∇_θ log π_t over the
planned sequences. So each sequence with c_s ≠ 0 becomes a row whose response is the answer, whose old log-probs are
those of the scoring pass and whose advantage is constant. A row's gradient at ratio 1 is its advantage times
Σ_t ∇_θ log π_t, divided as verl's ``loss_agg_mode`` divides; further away PPO's clip holds it as any other row.

Placement [ours]: verl takes one optimiser step per mini-batch, along the mean of its rows, so over M mini-batches it
goes M times the mean of the batch. The correction does the same: a mini-batch carries the M-th part of the sequences,
in the plan's order (that of the rollouts), at M times their weight.

Further rows change what verl divides by: the policy rows' advantages are scaled up by the same factor meanwhile. This
module has the numbers, :mod:`~verl_bridge.integrations.verl.correction_rows` puts the rows into verl's batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: How verl may add up its loss for the rows to have a definite weight.
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def place(count: int, mini_batches: int, multiple: int) -> tuple[list[range], int]:
    """Which of ``count`` sequences each mini-batch carries, evenly and in order, and the rows it gets for them.

    Rows are as many in every mini-batch and a multiple of ``multiple``; those beyond its sequences are padding.
    """
    ends = [(count * (i + 1)) // mini_batches for i in range(mini_batches)]
    parts = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return parts, math.ceil(max(map(len, parts)) / multiple) * multiple


def weigh(
    coefficients: Sequence[float],
    lengths: Sequence[int],
    *,
    mini_batches: int,
    loss_agg_mode: str,
    policy_rows: int,
    policy_tokens: int,
    rows: int,
) -> tuple[list[float], float]:
    """Advantages for the sequences of one mini-batch, and the factor for those of its policy rows.

    Args:
        coefficients: (γ/τ_l)·c_s of the sequences it carries.
        lengths: tokens of their answers.
        mini_batches: M, into which the batch is cut.
        loss_agg_mode: one of :data:`LOSS_AGG_MODES`.
        policy_rows, policy_tokens: what verl divides by without the correction.
        rows: further rows in the mini-batch, padding included.
    """
    if loss_agg_mode == "token-mean":
        divisor, before = policy_tokens + sum(lengths), policy_tokens
    else:
        divisor, before = policy_rows + rows, policy_rows
    per_token = [length if loss_agg_mode == "seq-mean-token-mean" else 1 for length in lengths]
    advantages = [mini_batches * c * divisor * n for c, n in zip(coefficients, per_token, strict=True)]
    return advantages, divisor / before if before else 1.0
