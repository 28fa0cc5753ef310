"""The relative change of an advantage, read off the result: δ = Ã/A − 1, and 0 for rollouts that left the loss."""

from dataclasses import dataclass

import torch


@dataclass
class Grounded:
    """A result with its residual beside it."""

    advantages: torch.Tensor
    metrics: dict
    residual: torch.Tensor


def with_residual(base, result):
    changed = (result.advantages != base) & (result.advantages != 0) & ~base.isnan()
    return Grounded(
        result.advantages, result.metrics, torch.where(changed, result.advantages / base - 1, torch.zeros_like(base))
    )
