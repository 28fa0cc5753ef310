"""BRIDGE: the retriever's objective, credit from RL and from the likelihood of the answer ("BRIDGE" in README.md).

[paper] is arXiv 2609.36505, [ours] a choice made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl_bridge.algorithms.grounding import Groups, figures

CreditWeights = Literal["likelihood", "posterior"]
_LOG_RATIO_LIMIT = 20.0  # exp stays finite, so that a clipped branch has gradient 0 and not 0·inf
_EPSILON = 1e-6  # added to σ, as in verl's GRPO


@dataclass(frozen=True)
class BridgeLoss:
    """The retriever's loss on a batch of retrieval turns.

    Args:
        loss: (α·L_RL + γ·L_RAG)/(α + γ), scalar with gradient to the scores; α the weight of the RL part, 1 [paper].
        rl_loss: L_RL, scalar with gradient.
        rag_loss: L_RAG, scalar with gradient.
        metrics: ``bridge/*`` figures of the batch.
    """

    loss: Tensor
    rl_loss: Tensor
    rag_loss: Tensor
    metrics: dict[str, float]


def retrieval_log_probs(scores: Tensor, candidate_mask: Tensor, tau_retrieval: float = 0.4) -> Tensor:
    """log p_η(d|q) = log softmax of s/τ_r over the candidates of each turn [paper], ``(turns, candidates)``.

    Padded candidates get -inf. Raises ValueError for τ_r ≤ 0 or a turn without candidates.
    """
    _check_temperature("tau_retrieval", tau_retrieval)
    _check_candidates(candidate_mask)
    return (_precise(scores) / tau_retrieval).masked_fill(~candidate_mask, -torch.inf).log_softmax(dim=-1)


def document_weights(
    answer_log_likelihood: Tensor,
    old_log_probs: Tensor,
    candidate_mask: Tensor,
    *,
    tau_posterior: float = 0.5,
    form: CreditWeights = "likelihood",
) -> Tensor:
    """How the credit of a turn is spread over its candidates, without gradient, ``(turns, candidates)``.

    ``likelihood``: w = softmax(ℓ/τ_p); ``posterior``: w ∝ p_old·exp(ℓ/τ_p) [paper: likelihood weights with a
    temperature; ours: the two forms]. Padded candidates get 0.

    Args:
        answer_log_likelihood: ℓ_d, log-likelihood of the gold answer given the document, ``(turns, candidates)`` nats.
        old_log_probs: log p_old(d|q) of the adapter that served the turn, ``(turns, candidates)``.
        candidate_mask: True on real candidates, ``(turns, candidates)`` bool.

    Raises:
        ValueError: unknown form, τ_p ≤ 0, a turn without candidates, or a likelihood that is not finite.
    """
    _check_temperature("tau_posterior", tau_posterior)
    _check_candidates(candidate_mask)
    _check_finite("answer_log_likelihood", answer_log_likelihood, candidate_mask)
    logits = _precise(answer_log_likelihood.detach()) / tau_posterior
    if form == "posterior":
        logits = logits + _precise(old_log_probs.detach())
    elif form != "likelihood":
        raise ValueError(f"bridge.credit_weights={form!r} is not one of 'likelihood', 'posterior'")
    return logits.masked_fill(~candidate_mask, -torch.inf).softmax(dim=-1)


def answer_posterior(
    log_probs: Tensor, answer_log_likelihood: Tensor, candidate_mask: Tensor, tau_likelihood: float = 1.0
) -> Tensor:
    """Which document explains the answer: softmax_d(log p_η(d|q) + ℓ_d/τ_l), without gradient, ``(turns, candidates)``.

    It is the gradient of -L_RAG's terms in ℓ_d/τ_l, so the difference of two retriever states' posteriors is how
    ``two_state`` corrects the policy's gradient [paper]. Padded candidates get 0.

    Args:
        log_probs: log p_η(d|q), :func:`retrieval_log_probs`, ``(turns, candidates)``.
        answer_log_likelihood: ℓ_d in nats, ``(turns, candidates)``.
        candidate_mask: True on real candidates, ``(turns, candidates)`` bool; the rest may hold anything.

    Raises:
        ValueError: τ_l ≤ 0, a turn without candidates, or a value that is not finite where it counts.
    """
    _check_temperature("tau_likelihood", tau_likelihood)
    candidate_mask = candidate_mask.bool()
    _check_candidates(candidate_mask)
    _check_finite("log_probs", log_probs, candidate_mask)
    _check_finite("answer_log_likelihood", answer_log_likelihood, candidate_mask)
    logits = _precise(log_probs.detach()) + _precise(answer_log_likelihood.detach()) / tau_likelihood
    return logits.masked_fill(~candidate_mask, -torch.inf).softmax(dim=-1)


def bridge_loss(
    scores: Tensor,
    old_log_probs: Tensor,
    answer_log_likelihood: Tensor,
    advantages: Tensor,
    candidate_mask: Tensor,
    *,
    rl_mask: Tensor | None = None,
    tau_retrieval: float = 0.4,
    tau_posterior: float = 0.5,
    tau_likelihood: float = 1.0,
    clip: float = 0.2,
    gamma: float = 0.25,
    rl_weight: float = 1.0,
    credit_weights: CreditWeights = "likelihood",
    turn_count: int | None = None,
    rl_turn_count: int | None = None,
    hit_mask: Tensor | None = None,
) -> BridgeLoss:
    """(α·L_RL + γ·L_RAG)/(α + γ) over a batch of retrieval turns, α = 1 [paper].

    L_RL = -mean over turns of Σ_d w_d·min(r_d·A, clip(r_d, 1-ε, 1+ε)·A), r_d = p_η/p_old;
    L_RAG = -mean over turns of log Σ_d p_η(d|q)·exp(ℓ_d/τ_l).

    Args:
        scores: s_η(q, d), inner products of normalised embeddings, ``(turns, candidates)``, with gradient.
        old_log_probs: log p_old(d|q), :func:`retrieval_log_probs` of the serving adapter, ``(turns, candidates)``.
        answer_log_likelihood: ℓ_d in nats, ``(turns, candidates)``.
        advantages: trajectory-level advantage of each turn's rollout, before GCA, ``(turns,)``.
        candidate_mask: True on real candidates, ``(turns, candidates)`` bool; the rest may hold anything.
        rl_mask: turns that take part in L_RL, ``(turns,)`` bool; type D that is not retrievable does not [ours].
        tau_retrieval: τ_r of p_η.
        tau_posterior: τ_p of the credit weights.
        tau_likelihood: τ_l of L_RAG.
        clip: ε.
        gamma: γ ≥ 0.
        rl_weight: α ≥ 0; with 0 only L_RAG is left. α and γ may not both be 0.
        credit_weights: form of w, see :func:`document_weights`.
        turn_count, rl_turn_count: denominators of the two means; those of the whole batch when this is a part of it,
            so that the losses of the parts add up.
        hit_mask: candidates that hold a gold alias, ``(turns, candidates)`` bool, for metrics.

    Raises:
        ValueError: a setting out of range, a turn without candidates, or a value that is not finite where it counts.
    """
    _check_temperature("tau_likelihood", tau_likelihood)
    if not 0 < clip < 1 or not 0 <= gamma < torch.inf:
        raise ValueError(f"bridge.clip={clip} must lie in (0, 1) and bridge.gamma={gamma} be at least 0")
    if not 0 <= rl_weight < torch.inf or rl_weight + gamma == 0:
        raise ValueError(f"rl_weight={rl_weight} must be at least 0, and above it where bridge.gamma={gamma} is 0")
    candidate_mask = candidate_mask.bool()
    rl_mask = torch.ones_like(advantages, dtype=torch.bool) if rl_mask is None else rl_mask.bool()
    _check_finite("scores", scores, candidate_mask)
    _check_finite("old_log_probs", old_log_probs, candidate_mask)
    _check_finite("advantages", advantages, rl_mask)
    log_probs = retrieval_log_probs(scores, candidate_mask, tau_retrieval)
    weight = document_weights(
        answer_log_likelihood, old_log_probs, candidate_mask, tau_posterior=tau_posterior, form=credit_weights
    )

    log_ratio = torch.where(candidate_mask, log_probs - _precise(old_log_probs.detach()), 0.0)
    ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    advantage = torch.where(rl_mask, _precise(advantages.detach()), 0.0).unsqueeze(-1)  # (turns, 1)
    plain, clipped = ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage
    credit = (weight * torch.minimum(plain, clipped)).sum(dim=-1)
    rl_loss = -credit.sum() / max(rl_turn_count if rl_turn_count is not None else int(rl_mask.sum()), 1)

    likelihood = (_precise(answer_log_likelihood.detach()) / tau_likelihood).masked_fill(~candidate_mask, 0.0)
    evidence = torch.logsumexp(log_probs + likelihood, dim=-1)  # (turns,)
    rag_loss = -evidence.sum() / max(turn_count if turn_count is not None else len(evidence), 1)

    metrics = {"loss_rl": rl_loss, "loss_rag": rag_loss}
    metrics |= _metrics(log_probs, ratio, clipped < plain, weight, advantages, rl_mask, candidate_mask, hit_mask)
    return BridgeLoss(
        loss=(rl_weight * rl_loss + gamma * rag_loss) / (rl_weight + gamma),
        rl_loss=rl_loss,
        rag_loss=rag_loss,
        metrics=figures("bridge", metrics),
    )


@torch.no_grad()
def _metrics(
    log_probs: Tensor,
    ratio: Tensor,
    cut: Tensor,
    weight: Tensor,
    advantages: Tensor,
    rl_mask: Tensor,
    candidate_mask: Tensor,
    hit_mask: Tensor | None,
) -> dict[str, Tensor]:
    """``bridge/*`` besides the losses: counts, and means over the turns, RL turns or candidates they are about."""
    probs = log_probs.exp()
    metrics = {
        "turns": candidate_mask.any(dim=-1).sum(),
        "rl_turns": rl_mask.sum(),
        "zero_advantage_share": _mean((advantages == 0)[rl_mask]),
        "credit_weight_max": _mean(weight.amax(dim=-1)),
        "retrieval_prob_max": _mean(probs.amax(dim=-1)),
        "retrieval_entropy": _mean(-(probs * log_probs.masked_fill(~candidate_mask, 0.0)).sum(dim=-1)),
        "ratio_deviation_max": (ratio - 1).abs().max() if len(ratio) else ratio.new_zeros(()),
        "clip_share": _mean(cut[rl_mask][candidate_mask[rl_mask]]),
    }
    if hit_mask is not None:
        hits = hit_mask & candidate_mask
        with_hit = hits.any(dim=-1)
        metrics["hit_in_candidates"] = _mean(with_hit)
        metrics["hit_credit_weight"] = _mean((weight * hits).sum(dim=-1)[with_hit])
    return metrics


def standardised_outcome(rewards: Tensor, group_index: Tensor, *, row_mask: Tensor | None = None) -> Tensor:
    """Outcome reward standardised over its group: the A_i of L_RL under estimators other than GRPO [ours].

    (R - mean)/(σ + ε) with the n-1 σ of verl's GRPO, which it equals for groups of two or more. A group of one is
    standardised over the batch. Equal rewards give exactly 0. Padding rows get 0 and do not count. ``(batch,)``
    """
    groups = Groups.of(group_index, row_mask)
    result = _standardised(rewards, groups)
    alone = (groups.sizes == 1)[groups.row_group]
    if bool(alone.any()):
        batch = Groups.of(torch.zeros_like(group_index), groups.row_mask)
        result = torch.where(alone, _standardised(rewards, batch), result)
    return torch.where(groups.row_mask, result, 0.0)


def _standardised(rewards: Tensor, groups: Groups) -> Tensor:
    centred, sigma = groups.centred(rewards)
    result = centred / (sigma + _EPSILON)[groups.row_group]
    # exact zeros: the mean of equal numbers is not always that number
    return torch.where(groups.zero_variance(rewards)[groups.row_group], 0.0, result).to(rewards.dtype)


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _mean(values: Tensor) -> Tensor:
    return values.to(torch.float64).sum() / max(values.numel(), 1)


def _check_temperature(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"bridge.{name}={value} must be a positive number")


def _check_candidates(candidate_mask: Tensor) -> None:
    empty = ~candidate_mask.bool().any(dim=-1)
    if bool(empty.any()):
        raise ValueError(f"retrieval turn {int(empty.nonzero()[0])} has no candidates: leave failed retrievals out")


def _check_finite(name: str, values: Tensor, mask: Tensor) -> None:
    broken = (~values.isfinite() & mask).nonzero()
    if len(broken):
        turn = int(broken[0, 0])
        raise ValueError(f"{name}: turn {turn} holds {values[tuple(broken[0])].item()}; leave the turn out")
