"""One adapter's optimiser: AdamW, its schedule and the objective it follows."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from verl_bridge.algorithms.bridge import BridgeLoss, bridge_loss, retrieval_log_probs
from verl_bridge.bilevel.tensors import BatchTensors
from verl_bridge.config.schema import LR_SCHEDULES
from verl_bridge.retrieval.encoder import QueryEncoder

logger = logging.getLogger(__name__)

Objective = Literal["penalised", "rag", "rl"]
OBJECTIVES: tuple[Objective, ...] = ("penalised", "rag", "rl")

COUNTED_BY = {
    "bridge/loss_rl": "rl_turns",
    "bridge/zero_advantage_share": "rl_turns",
    "bridge/clip_share": "rl_candidates",
    "bridge/hit_credit_weight": "hit_turns",
}
"""What a step's figure is a mean over, where it is not all its turns."""


@dataclass(frozen=True)
class Training:
    """What the steps of one update did.

    Args:
        steps: (counts, metrics) of every step taken; counts are ``turns`` and what COUNTED_BY names.
        dropped: steps that were not taken because something was not finite.
        first_log_probs: log p(d|q) before the first step, ``(turns, candidates)``, padding -inf; None when that step
            held other than all turns, or was dropped.
        weights: those of L_RL and L_RAG in the loss, adding up to 1.
    """

    steps: list[tuple[dict[str, int], dict[str, float]]]
    dropped: int
    first_log_probs: torch.Tensor | None
    weights: tuple[float, float]

    def metrics(self) -> dict[str, float]:
        """The figures of all steps as one; empty when no step was taken.

        Means weigh a step by what they are taken over (its turns, or those with RL credit, and so on), so that how the
        turns were divided does not matter; ``ratio_deviation_max`` is the largest. ``grad_norm`` is the loss's gradient
        in the adapter's parameters, before it is scaled down; ``grad_norm_rl`` and ``grad_norm_rag`` are the gradients
        of L_RL and L_RAG in the query vectors: compare them with each other, not with the first.
        """
        if not self.steps:
            return {}
        means = {}
        for name in self.steps[0][1]:
            counts = [count[COUNTED_BY.get(name, "turns")] for count, _ in self.steps]
            total = sum(count * values[name] for count, (_, values) in zip(counts, self.steps, strict=True))
            means[name] = total / max(sum(counts), 1)
        means["bridge/ratio_deviation_max"] = max(values["bridge/ratio_deviation_max"] for _, values in self.steps)
        means["bridge/loss"] = sum(
            weight * means[name]
            for weight, name in zip(self.weights, ("bridge/loss_rl", "bridge/loss_rag"), strict=True)
        )
        return means


class AdapterLearner:
    """Steps on the adapter that the encoder holds when it is called.

    Args:
        encoder: the query encoder; its adapter is updated in place.
        objective: ``penalised``, (L_RL + γ·L_RAG)/(1 + γ) [paper]; ``rag``, only L_RAG; ``rl``, only L_RL.
        gamma: γ.
        tau_retrieval, tau_posterior, tau_likelihood, clip, credit_weights: as of
            :func:`~verl_bridge.algorithms.bridge.bridge_loss`.
        lr: AdamW learning rate.
        weight_decay: AdamW weight decay.
        max_grad_norm: gradient norm above which gradients are scaled down.
        lr_schedule: ``constant``, or ``linear`` or ``cosine`` over updates, from the full rate at the end of the
            warm-up down to 0 at the update that would follow the last one.
        lr_warmup: updates over which the learning rate rises: w of them take 1/w, 2/w … 1 of it, so that the first one
            moves; 0 and 1 are none.
        total_updates: updates of the run, where ``linear`` and ``cosine`` end; ``constant`` does not look at it.
        queries_at_once: most distinct queries whose activations are held at a time, fewer when they are long; gradients
            add up over the groups, so that it bounds memory and changes nothing else.
        compute_dtype: number format of the encoder's matrix products, ``float32``, ``bfloat16`` or ``auto`` (bfloat16
            on a GPU that has it); weights, gradients and moments stay in float32.

    Raises:
        ValueError: a setting out of range; names it and the fix.
    """

    def __init__(
        self,
        encoder: QueryEncoder,
        *,
        objective: Objective = "penalised",
        gamma: float = 0.25,
        tau_retrieval: float = 0.4,
        tau_posterior: float = 0.5,
        tau_likelihood: float = 1.0,
        clip: float = 0.2,
        credit_weights: str = "likelihood",
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        lr_schedule: str = "constant",
        lr_warmup: int = 0,
        total_updates: int | None = None,
        queries_at_once: int = 32,
        compute_dtype: str = "float32",
    ) -> None:
        from transformers import get_scheduler

        if objective not in OBJECTIVES:
            raise ValueError(f"objective={objective!r} is not one of {', '.join(OBJECTIVES)}")
        _check_schedule(lr_schedule, lr_warmup, total_updates)
        if queries_at_once < 1:
            raise ValueError(f"queries_at_once is {queries_at_once}; use at least 1")
        for key, value, above in (("lr", lr, True), ("max_grad_norm", max_grad_norm, True), ("gamma", gamma, False)):
            if not (value > 0 or (value == 0 and not above)):
                raise ValueError(f"{key} is {value}; use {'more than' if above else 'at least'} 0")
        self.encoder, self.queries_at_once, self.max_grad_norm = encoder, queries_at_once, max_grad_norm
        self.tau_retrieval, self.tau_likelihood = tau_retrieval, tau_likelihood
        self.rl_weight, self.gamma = {"penalised": (1.0, gamma), "rag": (0.0, 1.0), "rl": (1.0, 0.0)}[objective]
        self.loss_settings = {
            "tau_retrieval": tau_retrieval,
            "tau_posterior": tau_posterior,
            "tau_likelihood": tau_likelihood,
            "clip": clip,
            "credit_weights": credit_weights,
            "gamma": self.gamma,
            "rl_weight": self.rl_weight,
        }
        self.compute_dtype = training_dtype(compute_dtype, encoder.base.model.device)
        self.parameters = encoder.lora_parameters()
        self.lr = lr
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=lr, weight_decay=weight_decay)
        # The library's schedules start at step 0, with rate 0 under a warm-up, and end with rate 0. Update i, from 1,
        # is their step i, and the end is the step after the last update: every update moves.
        name = "constant_with_warmup" if lr_schedule == "constant" else lr_schedule
        self._end = None if lr_schedule == "constant" else total_updates + 1
        warmup = max(lr_warmup, 1)
        schedule = get_scheduler(name, self.optimizer, num_warmup_steps=warmup, num_training_steps=self._end)
        self._share = schedule.lr_lambdas[0]  # of the learning rate, by the step

    def encode(self, texts: Sequence[str], *, training: bool = False) -> torch.Tensor:
        """Query vectors ``(texts, dim)`` in the format that training computes in, so that ratios start at 1."""
        return self.encoder.encode_queries(texts, training=training, compute_dtype=self.compute_dtype)

    def log_probs(self, data: BatchTensors, minibatches: Sequence[torch.Tensor]) -> torch.Tensor:
        """log p_η(d|q) of the turns in ``minibatches``, ``(turns, candidates)``, no gradient; -inf elsewhere.

        A turn whose scores are not finite is NaN throughout. Grouped as :meth:`train` groups them: what rounding
        depends on is then the same.

        Raises:
            ValueError: scores are not finite because the adapter's parameters are not.
        """
        out = torch.full(data.mask.shape, -torch.inf, device=data.mask.device)
        for rows in minibatches:
            for group in data.groups(rows, self.queries_at_once):
                scores = data.scores(self.encode(group.texts), group)
                bad = ~scores.isfinite().all(dim=-1, keepdim=True)
                if bad.any() and not all(p.isfinite().all() for p in self.parameters.values()):
                    version = self.encoder.adapter_version
                    raise ValueError(f"adapter version {version} holds values that are not finite; load a saved one")
                log_probs = retrieval_log_probs(scores, data.mask[group.rows], self.tau_retrieval)
                out[group.rows] = log_probs.masked_fill(bad, torch.nan)
        return out

    def train(
        self,
        data: BatchTensors,
        minibatches: Sequence[torch.Tensor],
        *,
        updates: int,
        old_log_probs: torch.Tensor | None = None,
    ) -> Training:
        """One optimiser step for every entry of ``minibatches``.

        Args:
            data: the batch.
            minibatches: the turns of each step.
            updates: how many updates came before, which sets the learning rate.
            old_log_probs: log p_old(d|q), ``(turns, candidates)``; None takes every step's own, for a single step on
                turns that the present adapter served.
        """
        position = updates + 1 if self._end is None else min(updates + 1, self._end)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self._share(position)
        steps, dropped, first = [], 0, None
        for number, rows in enumerate(minibatches):
            scores = torch.zeros(data.mask.shape, device=data.mask.device)
            metrics = self._step(data, rows, old_log_probs, scores)
            if metrics is None:
                dropped += 1
                continue
            if number == 0 and len(rows) == len(data):
                first = retrieval_log_probs(scores, data.mask, self.tau_retrieval)
            steps.append((data.counts(rows), metrics))
        total = self.rl_weight + self.gamma
        return Training(steps, dropped, first, (self.rl_weight / total, self.gamma / total))

    @property
    def learning_rate(self) -> float:
        """That of the last update."""
        return self.optimizer.param_groups[0]["lr"]

    def _step(
        self, data: BatchTensors, rows: torch.Tensor, old_log_probs: torch.Tensor | None, all_scores: torch.Tensor
    ) -> dict[str, float] | None:
        """One step on the turns ``rows``, whose scores go into ``all_scores``; None when it was dropped."""
        counts = {"turn_count": len(rows), "rl_turn_count": int(data.rl_mask[rows].sum())}
        squares = {"rl": 0.0, "rag": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        for group in data.groups(rows, self.queries_at_once):
            vectors = self.encode(group.texts, training=True)
            leaf = vectors.detach().requires_grad_()  # both gradients stop here, the encoder is walked once
            scores = data.scores(leaf, group)
            if not scores.isfinite().all():
                return self._drop()
            all_scores[group.rows] = scores.detach()
            result = self._loss(scores, data, old_log_probs, group.rows, **counts)
            (rl_slope,) = torch.autograd.grad(result.rl_loss, leaf, retain_graph=True)
            (rag_slope,) = torch.autograd.grad(result.rag_loss, leaf)
            squares["rl"] += rl_slope.square().sum().item()
            squares["rag"] += rag_slope.square().sum().item()
            parts = ((self.rl_weight, rl_slope), (self.gamma, rag_slope))
            slope = sum(weight * part for weight, part in parts if weight)  # 0·∞ would be no number
            vectors.backward(slope / (self.rl_weight + self.gamma))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm)
        with torch.no_grad():
            hits = None if data.hits is None else data.hits[rows]
            result = self._loss(all_scores[rows], data, old_log_probs, rows, hit_mask=hits)
        if not torch.isfinite(result.loss) or not torch.isfinite(norm):
            return self._drop()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            **result.metrics,
            "bridge/loss": result.loss.item(),
            "bridge/grad_norm": norm.item(),
            "bridge/grad_norm_rl": math.sqrt(squares["rl"]),
            "bridge/grad_norm_rag": math.sqrt(squares["rag"]),
        }

    def _loss(
        self,
        scores: torch.Tensor,
        data: BatchTensors,
        old_log_probs: torch.Tensor | None,
        rows: torch.Tensor,
        **settings: Any,
    ) -> BridgeLoss:
        mask = data.mask[rows]
        if old_log_probs is None:
            old = retrieval_log_probs(scores.detach(), mask, self.tau_retrieval)
        else:
            old = old_log_probs[rows]
        return bridge_loss(
            scores,
            old,
            data.log_likelihood[rows],
            data.advantages[rows],
            mask,
            rl_mask=data.rl_mask[rows],
            **self.loss_settings,
            **settings,
        )

    def _drop(self) -> None:
        logger.warning("a retriever step was dropped: its scores, loss or gradient are not finite")
        self.optimizer.zero_grad(set_to_none=True)


def training_dtype(compute_dtype: str, device: torch.device) -> str:
    """``float32`` or ``bfloat16``; ``auto`` is bfloat16 on a GPU that has it. Raises ValueError for another name."""
    if compute_dtype not in ("float32", "bfloat16", "auto"):
        raise ValueError(f"compute_dtype={compute_dtype!r} is not one of float32, bfloat16, auto")
    if compute_dtype != "auto":
        return compute_dtype
    on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if on_gpu else "float32"


def _check_schedule(lr_schedule: str, lr_warmup: int, total_updates: int | None) -> None:
    if lr_schedule not in LR_SCHEDULES:
        raise ValueError(f"lr_schedule={lr_schedule!r} is not one of {', '.join(LR_SCHEDULES)}")
    if lr_warmup < 0:
        raise ValueError(f"lr_warmup is {lr_warmup}; use at least 0")
    if lr_schedule == "constant":
        return
    if total_updates is None:
        raise ValueError(f"lr_schedule={lr_schedule!r} ends somewhere: give total_updates, the updates of the run")
    if total_updates < 1:
        raise ValueError(
            f"total_updates is {total_updates}, where lr_schedule={lr_schedule!r} needs at least 1 to end at; use "
            "'constant', or more steps or a smaller interval"
        )
    if lr_warmup > total_updates:
        raise ValueError(f"lr_warmup={lr_warmup} does not fit {total_updates} updates; use at most as many")
