"""``verl-bridge bench estimators``: BRIDGE's policy gradient on a problem whose exact hyper-gradient is known.

Found on 16 random problems with the default settings; relative errors, means:

- ``two_state``'s error against the exact gradient falls like 1/γ (slope -1.00), from 0.67 at γ = 0.05 to 1e-4 at 256.
- ``bridge``'s does not. As γ grows it becomes ``drop``, and its error tends to the share of the gradient that comes
  through η*, which both leave out: 0.11 here (cosine 0.994).
- Where the reward is exact match on the answer whose likelihood trains the retriever, the paper's claim holds in its
  own measure: against ``two_state``, ``bridge`` is nearer than ``drop`` at every γ, on every problem (at γ = 0.25: 0.12
  and 0.21). Against the *exact* gradient it is nearer on every problem from γ = 1, on most at 0.25 and 0.5 (0.083 and
  0.078 beside 0.107), and far worse on every problem below: at 0.05 its error is 0.60, since η_γ is far from η*.
- To first order in 1/γ bridge differs from drop by -(1/γ)·∇²_θηF·(∇²_ηηG)⁻¹·∇_ηF; both leave out
  -∇²_θηG·(∇²_ηηG)⁻¹·∇_ηF. These point the same way if F and G do, as when F is -exp(-G) question by question. With
  half of the reward paid for another answer this still holds; with all of it ``drop`` is nearer to the exact gradient
  at every γ on four problems of five, and from γ = 0.5 nearer to ``two_state`` too.

The gain of bridge over drop is thus O(1/γ), hardly any from γ = 8, and rests on reward and likelihood agreeing. The
pattern is the same for other ridges, readings and sizes; the size of what is left out is not (a stronger ridge, less).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import log10
from typing import Any

import torch
from torch import Tensor

from verl_bridge.algorithms.estimators import ESTIMATORS, hypergradient, minimise, policy_gradient
from verl_bridge.files import new_file

GAMMAS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
TAU_RETRIEVAL = 0.4
_DIFFERENCE = 1e-4  # step of the finite differences: their error is of its square


@dataclass(frozen=True)
class Toy:
    """A retriever and a policy small enough to solve exactly: one retrieval, one document read, one answer given.

    The retriever has a frozen base and an adapter η, a matrix on the query side: p_η = softmax(s/τ_r) with
    s = xᵀ(I + τ_r·η)e. The policy reads document d to question q and gives answer a with
    π_θ(a|q, d) = softmax_a(what d says for a + θ_a·φ_qd).

    Args:
        query_vectors: x, of norm 1, ``(queries, dim)``.
        document_vectors: e, of norm 1, ``(documents, dim)``.
        readings: what a document says for each answer, in nats, ``(queries, documents, answers)``.
        features: φ, ``(queries, documents, features)``.
        gold: the answer whose likelihood trains the retriever, ``(queries,)`` int64.
        rewards: what each answer earns, ``(queries, answers)``.
        ridge: λ of G; above :func:`curvature_bound`, so that G is strongly convex in η and η* unique.
        theta: the policy at which gradients are taken, ``(answers * features,)``.
    """

    query_vectors: Tensor
    document_vectors: Tensor
    readings: Tensor
    features: Tensor
    gold: Tensor
    rewards: Tensor
    ridge: float
    theta: Tensor

    def base(self) -> Tensor:
        """The adapter that changes nothing, ``(dim * dim,)``."""
        return self.query_vectors.new_zeros(self.query_vectors.shape[1] ** 2)

    def retrieval(self, eta: Tensor) -> Tensor:
        """log p_η(d|q), ``(queries, documents)``."""
        dim = self.query_vectors.shape[1]
        adapter = torch.eye(dim, dtype=eta.dtype) / TAU_RETRIEVAL + eta.view(dim, dim)
        return (self.query_vectors @ adapter @ self.document_vectors.T).log_softmax(dim=-1)

    def policy(self, theta: Tensor) -> Tensor:
        """log π_θ(a|q, d), ``(queries, documents, answers)``."""
        weights = theta.view(self.readings.shape[-1], -1)
        return (self.readings + self.features @ weights.T).log_softmax(dim=-1)

    def likelihood(self, theta: Tensor) -> Tensor:
        """ℓ_d, log-likelihood of the gold answer given each document, ``(queries, documents)``."""
        index = self.gold[:, None, None].expand(*self.readings.shape[:2], 1)
        return self.policy(theta).gather(-1, index).squeeze(-1)

    def upper(self, theta: Tensor, eta: Tensor) -> Tensor:
        """F: minus the expected reward of retrieving and answering, every outcome enumerated."""
        earned = (self.policy(theta).exp() * self.rewards[:, None, :]).sum(dim=-1)  # (queries, documents)
        return -(self.retrieval(eta).exp() * earned).sum(dim=-1).mean()

    def rag(self, theta: Tensor, eta: Tensor) -> Tensor:
        """L_RAG: minus the mean log Σ_d p_η(d|q)·exp(ℓ_d)."""
        return -torch.logsumexp(self.retrieval(eta) + self.likelihood(theta), dim=-1).mean()

    def lower(self, theta: Tensor, eta: Tensor) -> Tensor:
        """G: L_RAG with λ/2·‖η‖² added."""
        return self.rag(theta, eta) + self.ridge / 2 * eta.square().sum()


def curvature_bound(query_vectors: Tensor, document_vectors: Tensor) -> float:
    """How far below 0 the curvature of L_RAG can be, whatever θ and η.

    L_RAG is convex but for minus the covariance of document vectors under the posterior, whose variance in any
    direction is at most (largest distance/2)²; a question's share in an η direction comes from mean x·xᵀ.
    """
    spread = float(torch.cdist(document_vectors, document_vectors).max()) / 2
    return spread**2 * float(torch.linalg.eigvalsh(query_vectors.T @ query_vectors / len(query_vectors))[-1])


def make_toy(
    seed: int,
    *,
    disagreement: float = 0.0,
    queries: int = 4,
    documents: int = 6,
    answers: int = 4,
    dim: int = 4,
    features: int = 6,
    reading: float = 2.0,
    ridge: float = 1.1,
) -> Toy:
    """A random problem, float64, the same for the same seed.

    Every document states one answer to every question, in ``reading`` nats; one document at least states the gold.

    Args:
        seed: of all that is random.
        disagreement: share of the reward paid for another answer than the gold, whose likelihood trains the retriever;
            0 is exact match.
        queries, documents, answers, dim, features: sizes, see :class:`Toy`.
        reading: nats that a document gives the answer it states.
        ridge: λ in units of :func:`curvature_bound`, above 1.

    Raises:
        ValueError: disagreement outside [0, 1], or a ridge that does not make the lower problem convex.
    """
    if not 0 <= disagreement <= 1 or not ridge > 1:
        raise ValueError(f"disagreement={disagreement} must lie in [0, 1] and ridge={ridge} be above 1")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def whole(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    query_vectors, document_vectors = (
        v / v.norm(dim=-1, keepdim=True) for v in (normal(queries, dim), normal(documents, dim))
    )
    gold = whole(answers, queries)
    stated = whole(answers, queries, documents)
    stated.scatter_(1, whole(documents, queries, 1), gold[:, None])
    other = (gold + 1 + whole(answers - 1, queries)) % answers
    one_hot = torch.nn.functional.one_hot
    return Toy(
        query_vectors=query_vectors,
        document_vectors=document_vectors,
        readings=reading * one_hot(stated, answers).double(),
        features=normal(queries, documents, features) / features**0.5,
        gold=gold,
        rewards=(1 - disagreement) * one_hot(gold, answers).double() + disagreement * one_hot(other, answers).double(),
        ridge=ridge * curvature_bound(query_vectors, document_vectors),
        theta=normal(answers * features),
    )


def solve_lower(toy: Toy, theta: Tensor) -> Tensor:
    """η*(θ), ``(retriever parameters,)``."""
    return minimise(lambda eta: toy.lower(theta, eta), toy.base())


def solve_penalised(toy: Toy, theta: Tensor, gamma: float, start: Tensor) -> Tensor:
    """η_γ(θ), the minimum of F + γG downhill from ``start``, ``(retriever parameters,)``.

    At small γ F + γG need not be convex: a path of falling γ from η* picks the minimum.
    """
    return minimise(lambda eta: (toy.upper(theta, eta) + gamma * toy.lower(theta, eta)) / (1 + gamma), start)


def measure_toy(toy: Toy, gammas: Sequence[float]) -> dict[str, Any]:
    """Every estimator at every γ (rising), beside the exact gradient, which is checked by finite differences.

    Returns:
        ``exact``, ``implicit`` (its part through η*), ``(policy parameters,)``; ``gradients``, a tensor ``(γ, policy
        parameters)`` per estimator; ``finite_difference_error``, relative, along three directions.
    """
    lowest = solve_lower(toy, toy.theta)
    exact, implicit = hypergradient(toy.upper, toy.lower, toy.theta, lowest)

    def solved(theta: Tensor) -> Tensor:
        return toy.upper(theta, minimise(lambda eta: toy.lower(theta, eta), lowest))

    axes = torch.randn(3, len(exact), generator=torch.Generator().manual_seed(0), dtype=exact.dtype)
    axes = axes / axes.norm(dim=-1, keepdim=True)
    slopes = [
        (solved(toy.theta + _DIFFERENCE * a) - solved(toy.theta - _DIFFERENCE * a)) / (2 * _DIFFERENCE) for a in axes
    ]

    gradients, penalised = {name: [] for name in ESTIMATORS}, lowest
    for gamma in reversed(gammas):
        penalised = solve_penalised(toy, toy.theta, gamma, penalised)
        for name, found in gradients.items():
            found.insert(0, policy_gradient(name, toy.upper, toy.lower, toy.theta, penalised, lowest, gamma))
    return {
        "exact": exact,
        "implicit": implicit,
        "gradients": {name: torch.stack(found) for name, found in gradients.items()},
        "finite_difference_error": float((torch.stack(slopes) - axes @ exact).abs().max() / exact.norm()),
    }


def measure_estimators(
    *,
    gammas: Sequence[float] = GAMMAS,
    seeds: int = 16,
    disagreements: Sequence[float] = (0.0, 0.5, 1.0),
    first_seed: int = 0,
) -> dict[str, Any]:
    """The three estimators on ``seeds`` random problems, for one kind of reward after the other.

    Args:
        gammas: values of γ, positive and rising.
        seeds: how many problems.
        disagreements: that of :func:`make_toy`; the figures of the first are the report's own.
        first_seed: of the first problem; the others follow it.

    Returns:
        ``gammas``, ``seeds``, ``other_rewards``: the figures of the further disagreements, and those of the first:
        ``disagreement``; ``cosine`` and ``relative_error`` {bridge, two_state, drop} against the exact gradient, means
        over the seeds per γ, ``cosine_spread`` and ``relative_error_spread`` their standard deviations;
        ``bridge_nearer_than_drop``, share of the seeds per γ with the lower relative error; ``against_two_state``, the
        same five for bridge and drop; ``two_state_slope``, of log error in log γ over the upper half of the γ, [least,
        greatest] of the seeds; ``left_out_share``, norm of the gradient through η* over that of the exact one, mean;
        ``finite_difference_error``, the largest.

    Raises:
        ValueError: too few seeds, γ or disagreements, or γ not rising.
    """
    gammas = [float(gamma) for gamma in gammas]
    if len(gammas) < 4 or gammas[0] <= 0 or any(b <= a for a, b in pairwise(gammas)):
        raise ValueError(f"gammas={gammas} must be four or more positive numbers, rising")
    if seeds < 2 or not disagreements:
        raise ValueError(f"seeds={seeds} must be 2 or more and disagreements={disagreements} not empty")
    reports = []
    for disagreement in disagreements:
        toys = [make_toy(first_seed + seed, disagreement=disagreement) for seed in range(seeds)]
        reports.append({"disagreement": disagreement, **_summary([measure_toy(toy, gammas) for toy in toys], gammas)})
    return {"gammas": gammas, "seeds": seeds, **reports[0], "other_rewards": reports[1:]}


def _summary(measured: list[dict[str, Any]], gammas: list[float]) -> dict[str, Any]:
    """The figures of one kind of reward, see :func:`measure_estimators`."""
    exact = torch.stack([toy["exact"] for toy in measured])[:, None, :]  # (seeds, 1, parameters)
    found = {name: torch.stack([toy["gradients"][name] for toy in measured]) for name in ESTIMATORS}
    upper_half = len(gammas) // 2
    x = torch.tensor(gammas[upper_half:], dtype=exact.dtype).log()
    y = _relative_error(found["two_state"], exact)[:, upper_half:].log()
    slopes = (y * (x - x.mean())).sum(dim=-1) / (x - x.mean()).square().sum()  # least squares, (seeds,)
    implicit = torch.stack([toy["implicit"] for toy in measured])
    two_state = found.pop("two_state")
    return {
        **_compared({"bridge": found["bridge"], "two_state": two_state, "drop": found["drop"]}, exact),
        "against_two_state": _compared(found, two_state),
        "two_state_slope": [float(slopes.min()), float(slopes.max())],
        "left_out_share": float((implicit.norm(dim=-1) / exact.squeeze(1).norm(dim=-1)).mean()),
        "finite_difference_error": max(toy["finite_difference_error"] for toy in measured),
    }


def _relative_error(gradients: Tensor, reference: Tensor) -> Tensor:
    return (gradients - reference).norm(dim=-1) / reference.norm(dim=-1)


def _compared(found: dict[str, Tensor], reference: Tensor) -> dict[str, Any]:
    """Gradients ``(seeds, γ, parameters)`` beside a reference that broadcasts to them, per γ."""
    cosines = {name: torch.cosine_similarity(values, reference, dim=-1) for name, values in found.items()}
    errors = {name: _relative_error(values, reference) for name, values in found.items()}
    return {
        "cosine": {name: values.mean(dim=0).tolist() for name, values in cosines.items()},
        "cosine_spread": {name: values.std(dim=0).tolist() for name, values in cosines.items()},
        "relative_error": {name: values.mean(dim=0).tolist() for name, values in errors.items()},
        "relative_error_spread": {name: values.std(dim=0).tolist() for name, values in errors.items()},
        "bridge_nearer_than_drop": (errors["bridge"] < errors["drop"]).double().mean(dim=0).tolist(),
    }


_COLOURS = {"bridge": "#0072b2", "two_state": "#009e73", "drop": "#d55e00"}
_WIDTH, _HEIGHT, _LEFT, _TOP = 230, 150, 60, 60  # of a panel, and of the room before it, pixels


def plot(report: dict[str, Any], path: str | os.PathLike) -> None:
    """Draws a report of :func:`measure_estimators` as SVG: a row per reward; cosine and error, by both references.

    Raises:
        ValueError: a name that does not end in .svg.
    """
    if not str(path).endswith(".svg"):
        raise ValueError(f"{path}: the plot is drawn as SVG; give a name that ends in .svg")
    rows = [report, *report["other_rewards"]]
    parts = []
    for row, figures in enumerate(rows):
        share = f"{figures['disagreement']:.0%} of reward off the gold"
        for column, (reference, source) in enumerate((("exact", figures), ("two_state", figures["against_two_state"]))):
            for offset, key in enumerate(("cosine", "relative_error")):
                left = _LEFT + (2 * column + offset) * (_WIDTH + _LEFT)
                title = f"{key.replace('_', ' ')} to {reference}, {share}"
                top = _TOP + row * (_HEIGHT + _TOP)
                parts += _panel(report["gammas"], source[key], title, left, top, log=key == "relative_error")
    for index, (name, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="{_LEFT + 90 * index}" y="22" fill="{colour}" font-weight="bold">{name}</text>')
    width, height = 4 * (_WIDTH + _LEFT) + 20, len(rows) * (_HEIGHT + _TOP) + 50
    size = f'width="{width}" height="{height}" font-family="sans-serif" font-size="10"'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    with new_file(path) as file:
        file.write("\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', background, *parts, "</svg>"]) + "\n")


def _panel(
    gammas: list[float], curves: dict[str, list[float]], title: str, left: int, top: int, *, log: bool
) -> list[str]:
    """One set of axes, γ on a logarithmic one, with a line per estimator."""

    def height(value: float) -> float:
        return log10(max(value, 1e-12)) if log else value

    values = [height(value) for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    low, high = (low, high) if high - low > 1e-9 else (low - 0.5, high + 0.5)
    first, last = log10(gammas[0]), log10(gammas[-1])

    def across(gamma: float) -> float:
        return left + _WIDTH * (log10(gamma) - first) / (last - first)

    def down(value: float) -> float:
        return top + _HEIGHT * (high - value) / (high - low)

    parts = [
        f'<text x="{left}" y="{top - 8}">{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{left + _WIDTH / 2}" y="{top + _HEIGHT + 28}">γ</text>',
    ]
    for gamma in (gammas[0], gammas[len(gammas) // 2], gammas[-1]):
        parts.append(f'<text x="{across(gamma):.1f}" y="{top + _HEIGHT + 14}" text-anchor="middle">{gamma:g}</text>')
    for value in (low, (low + high) / 2, high):
        shown = f"{10**value:.1e}" if log else f"{value:.3f}"
        parts.append(f'<text x="{left - 4}" y="{down(value) + 3:.1f}" text-anchor="end">{shown}</text>')
    for name, curve in curves.items():
        points = " ".join(f"{across(g):.1f},{down(height(v)):.1f}" for g, v in zip(gammas, curve, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_COLOURS[name]}" stroke-width="1.5"/>')
    return parts
