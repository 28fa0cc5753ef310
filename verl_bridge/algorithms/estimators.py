"""Policy gradients of the bilevel problem, exact and estimated (README.md beside this file, "Estimators").

The upper objective F(θ, η) is the RL loss, the lower one G(θ, η) the RAG loss. The problem is to minimise F(θ, η*(θ)),
η*(θ) = argmin_η G(θ, η). With η_γ = argmin_η F + γG the estimators of its gradient in θ are

    ``two_state``  ∇F(θ, η_γ) + γ·[∇G(θ, η_γ) - ∇G(θ, η*)]   [paper]
    ``bridge``     ∇F(θ, η_γ), the two corrections left out    [paper]
    ``drop``       ∇F(θ, η*), the retriever follows only G     [ours]

(F + γG)/(1 + γ), the loss of :mod:`verl_bridge.algorithms.bridge`, has the same η_γ: the factor scales the retriever's
step, not the policy's gradient, so nothing here is divided by 1 + γ.

θ and η are flat vectors. Exact solutions and Hessians are for problems of some hundred parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["bridge", "two_state", "drop"]
ESTIMATORS: tuple[Estimator, ...] = ("bridge", "two_state", "drop")
Loss = Callable[[Tensor, Tensor], Tensor]
"""θ ``(policy parameters,)`` and η ``(retriever parameters,)`` to a scalar loss."""

_ROUNDING = 1e-15  # two losses nearer than this, relatively, count as equal


def policy_loss(
    estimator: Estimator,
    upper: Loss,
    lower: Loss,
    theta: Tensor,
    penalised: Tensor,
    lowest: Tensor,
    gamma: float,
) -> Tensor:
    """The scalar whose gradient in θ, η held still, is the estimator's policy gradient.

    Args:
        estimator: one of ESTIMATORS.
        upper: F.
        lower: G.
        theta: θ, ``(policy parameters,)``.
        penalised: η_γ, ``(retriever parameters,)``; ``drop`` does not use it.
        lowest: η*, ``(retriever parameters,)``; ``bridge`` does not use it.
        gamma: γ > 0.

    Raises:
        ValueError: unknown estimator, or γ that is not positive.
    """
    if not 0 < gamma < float("inf"):
        raise ValueError(f"gamma={gamma} must be a positive number")
    penalised, lowest = penalised.detach(), lowest.detach()
    if estimator == "bridge":
        return upper(theta, penalised)
    if estimator == "drop":
        return upper(theta, lowest)
    if estimator == "two_state":
        return upper(theta, penalised) + gamma * (lower(theta, penalised) - lower(theta, lowest))
    raise ValueError(f"estimator={estimator!r} is not one of {', '.join(map(repr, ESTIMATORS))}")


def policy_gradient(
    estimator: Estimator,
    upper: Loss,
    lower: Loss,
    theta: Tensor,
    penalised: Tensor,
    lowest: Tensor,
    gamma: float,
) -> Tensor:
    """The gradient of :func:`policy_loss`, ``(policy parameters,)``; same arguments, same errors."""
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad(policy_loss(estimator, upper, lower, theta, penalised, lowest, gamma), theta)[0]


def hypergradient(upper: Loss, lower: Loss, theta: Tensor, lowest: Tensor) -> tuple[Tensor, Tensor]:
    """dF(θ, η*(θ))/dθ by implicit differentiation, and the part of it that comes through η*.

    The whole is ∇_θF - ∇²_θηG·(∇²_ηηG)⁻¹·∇_ηF at (θ, η*), the second result its second term. Both are
    ``(policy parameters,)``.

    Args:
        lowest: η*, where ∇_ηG = 0, ``(retriever parameters,)``.

    Raises:
        ValueError: G is not strictly convex at η*, so that η* is not an isolated minimum.
    """
    theta, lowest = theta.detach().requires_grad_(), lowest.detach().requires_grad_()
    direct, through = torch.autograd.grad(upper(theta, lowest), (theta, lowest))
    hessian = torch.func.hessian(lower, argnums=1)(theta.detach(), lowest.detach())
    curvature, axes = torch.linalg.eigh(hessian)
    if curvature[0] <= 1e-12 * curvature[-1]:
        raise ValueError(
            f"the lower objective is not strictly convex at the given point (curvature from {float(curvature[0]):.1e} "
            f"to {float(curvature[-1]):.1e}): give it a larger ridge"
        )
    direction = axes @ ((axes.T @ through) / curvature)
    slope = torch.autograd.grad(lower(theta, lowest), lowest, create_graph=True)[0]
    implicit = -torch.autograd.grad(slope @ direction, theta)[0]
    return direct + implicit, implicit


def minimise(
    objective: Callable[[Tensor], Tensor], start: Tensor, *, tolerance: float = 1e-12, max_steps: int = 200
) -> Tensor:
    """The minimum that Newton's method reaches downhill from ``start``, ``(parameters,)``.

    Where the curvature is negative its size is used, so that every step goes down; a step that does not is halved.

    Args:
        objective: a smooth scalar function of ``(parameters,)``, float64.
        tolerance: the gradient's norm at the end is below it.

    Raises:
        RuntimeError: the gradient's norm did not get below the tolerance, or the point where it did is not a minimum.
    """
    gradient, hessian = torch.func.grad(objective), torch.func.hessian(objective)
    point = start.detach().clone()
    value, slope = objective(point), gradient(point)
    for _ in range(max_steps):
        curvature, axes = torch.linalg.eigh(hessian(point))
        if slope.norm() < tolerance:
            if curvature[0] <= 0:
                raise RuntimeError(f"stationary, but not a minimum: the least curvature is {float(curvature[0]):.1e}")
            return point
        step = -axes @ ((axes.T @ slope) / curvature.abs().clamp(min=1e-8))
        size = 1.0
        while size > 1e-10:
            candidate = point + size * step
            new_value, new_slope = objective(candidate), gradient(candidate)
            # close to the minimum values differ only by rounding, and the gradient decides
            level = new_value <= value + _ROUNDING * (1 + value.abs()) and new_slope.norm() < slope.norm()
            if new_value <= value + 1e-4 * size * (slope @ step) or level:
                break
            size /= 2
        else:
            break
        point, value, slope = candidate, new_value, new_slope
    raise RuntimeError(
        f"Newton's method stopped at a gradient of norm {float(slope.norm()):.1e}, above {tolerance:.1e}"
    )
