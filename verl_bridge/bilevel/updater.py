"""BRIDGE's retriever update: one step of the lower level on a batch of retrieval turns. Knows no host.

By default the loss is (L_RL + γ·L_RAG)/(1+γ) over the candidates of each turn ("BRIDGE" in algorithms/README.md). Only
the LoRA adapter of the query encoder moves; document vectors and index stay as they are.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.learner import AdapterLearner, Objective
from verl_bridge.bilevel.state import LearnerState, optimizer_moments, set_moments
from verl_bridge.bilevel.tensors import BatchTensors
from verl_bridge.bilevel.watch import CollapseWatch
from verl_bridge.retrieval.encoder import QueryEncoder
from verl_bridge.retrieval.index import DocumentIndex

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateResult:
    """What an update did.

    Args:
        version: the adapter version after it.
        metrics: ``bridge/*`` figures.
        evidence_shift: with two states, per turn and candidate post_d(η_γ) - post_d(η*), post_d(η) =
            softmax_d(log p_η(d|q) + ℓ_d/τ_l), after both states' steps, 0 for a turn whose scores are not finite; None
            with one state.
    """

    version: int
    metrics: dict[str, float]
    evidence_shift: list[list[float]] | None = None


class RetrieverUpdater:
    """Owns the adapter's optimiser, its counters and the versions that may still be named.

    Args:
        encoder: the query encoder that serves; updated in place.
        index: document vectors.
        objective: ``penalised``, (L_RL + γ·L_RAG)/(1 + γ) [paper]; ``rag``, only L_RAG; ``rl``, only L_RL.
        minibatch_size: turns per optimiser step, None for all.
        epochs: passes over a batch.
        max_staleness: how many versions back a turn may have been served (0: synchronous training).
        seed: of the minibatch order.
        learning: the other settings of :class:`~verl_bridge.bilevel.learner.AdapterLearner`: ``lr``, ``gamma``,
            ``total_updates``, ``lr_schedule``, ``compute_dtype`` and so on.

    Raises:
        ValueError: a setting out of range; names it and the fix.
    """

    two_states = False

    def __init__(
        self,
        encoder: QueryEncoder,
        index: DocumentIndex,
        *,
        objective: Objective = "penalised",
        minibatch_size: int | None = None,
        epochs: int = 1,
        max_staleness: int = 0,
        seed: int = 0,
        **learning: Any,
    ) -> None:
        if minibatch_size is not None and minibatch_size < 1:
            raise ValueError(f"minibatch_size is {minibatch_size}; use at least 1 or None for the whole batch")
        for key, value, least in (("epochs", epochs, 1), ("max_staleness", max_staleness, 0)):
            if value < least:
                raise ValueError(f"{key} is {value}; use at least {least}")
        self.encoder, self.index = encoder, index
        self.minibatch_size, self.epochs, self.max_staleness = minibatch_size, epochs, max_staleness
        self.learner = AdapterLearner(encoder, objective=objective, **learning)
        self.generator = torch.Generator().manual_seed(seed)
        self.initial = encoder.adapter_state()  # drift is measured from here
        self.served: dict[int, dict[str, torch.Tensor]] = {}  # earlier versions that a turn may still name
        self.counters = {"updates": 0, "steps": 0, "steps_dropped": 0}
        self.watch = CollapseWatch()
        self.collapsed = False

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name."""
        return self.learner.parameters

    # ---- one update -------------------------------------------------------------------------------------------

    def known_versions(self) -> list[int]:
        """The adapter versions that turns may have been served by, ascending; the last one serves now."""
        current = self.encoder.adapter_version
        return sorted({current, *(version for version in self.served if version >= current - self.max_staleness)})

    def update(self, batch: RetrieverBatch) -> UpdateResult:
        """Trains on a batch and raises the adapter's version once when a step was taken.

        A step whose scores, loss or gradient are not finite is not taken (``bridge/steps_dropped``). Where scores are
        computed before the steps, for p_old, turns whose scores are not finite take no part in them; these and those
        without an evidence shift for that reason are ``bridge/turns_not_finite``. On an exception everything is as it
        was before the call.

        Raises:
            ValueError: a turn was served by a version that is neither current nor kept, an answer likelihood or
                advantage is not finite, or the parameters of an adapter are not.
            KeyError: a candidate that the index does not have.
        """
        started = time.perf_counter()
        if not batch.queries:
            return UpdateResult(self.encoder.adapter_version, {"bridge/turns": 0.0}, [] if self.two_states else None)
        self._check(batch)
        data = BatchTensors.of(batch, self.index, self.encoder.base.model.device)
        before, collapsed = self.state(), self.collapsed
        try:
            metrics, shift = self._train(batch, data, before.adapters["adapter"])
        except BaseException:  # out of memory between two steps, say: half an update serves nobody
            self._put_back(before)
            self.collapsed = collapsed
            raise
        metrics["bridge/update_seconds"] = time.perf_counter() - started
        return UpdateResult(self.encoder.adapter_version, metrics, shift)

    def _train(
        self, batch: RetrieverBatch, data: BatchTensors, before: dict[str, torch.Tensor]
    ) -> tuple[dict[str, float], list[list[float]] | None]:
        """Metrics and evidence shift of an update; ``before`` is the adapter as it is."""
        minibatches = self._minibatches(len(data))
        # A single step on turns of the present adapter sees p_old itself; otherwise it takes a pass of its own.
        known = len(minibatches) == 1 and set(batch.adapter_version) == {self.encoder.adapter_version}
        old = None if known else self._served_log_probs(data, batch.adapter_version, minibatches)
        bad = torch.zeros(len(data), dtype=torch.bool, device=data.mask.device)
        if old is not None:
            bad = old.isnan().any(dim=-1)
            minibatches = [rows[~bad[rows]] for rows in minibatches if not bad[rows].all()]
        version, updates = self.encoder.adapter_version, self.counters["updates"]
        trained = self.learner.train(data, minibatches, updates=updates, old_log_probs=old)
        if trained.steps:
            self.served = {v: s for v, s in self.served.items() if v > version - self.max_staleness}
            if self.max_staleness:
                self.served[version] = before
            self.encoder.adapter_version = version + 1
        second, shift, dropped = self._second_state(data, minibatches, updates)
        if shift is not None:
            bad = bad | shift.isnan().any(dim=-1)
            shift = shift.masked_fill(bad.unsqueeze(1), 0.0)
        if left_out := int(bad.sum()):
            logger.warning(
                "%d of %d retrieval turns have scores that are not finite and are left out", left_out, len(data)
            )
        self.counters["updates"] += 1
        self.counters["steps"] += len(trained.steps)
        self.counters["steps_dropped"] += trained.dropped + dropped
        metrics = {
            **trained.metrics(),
            **second,
            "bridge/turns": float(len(data)),
            "bridge/rl_turns": float(sum(batch.rl_mask)),
            "bridge/unique_queries": float(len(data.queries)),
            "bridge/lr": self.learner.learning_rate,
            "bridge/steps_dropped": float(trained.dropped + dropped),
            "bridge/turns_not_finite": float(left_out),
            "bridge/adapter_version": float(self.encoder.adapter_version),
        }
        metrics |= self._watch(data, trained.first_log_probs if old is None else old, metrics)
        if shift is None:
            return metrics, None
        sizes = data.mask.sum(dim=-1).tolist()
        return metrics, [row[:size] for row, size in zip(shift.tolist(), sizes, strict=True)]

    def _second_state(
        self, data: BatchTensors, minibatches: Sequence[torch.Tensor], updates: int
    ) -> tuple[dict[str, float], torch.Tensor | None, int]:
        """Metrics, evidence shift ``(turns, candidates)`` and steps dropped of a second state; there is none here.

        The shift of a turn whose scores are not finite is NaN.
        """
        return {}, None, 0

    def _check(self, batch: RetrieverBatch) -> None:
        known = self.known_versions()
        for turn, served in enumerate(batch.adapter_version):
            if served not in known:
                raise ValueError(
                    f"turn {turn} was served by adapter version {served} but the updater has {known}; train on "
                    "rollouts of the current adapter, or raise max_staleness for asynchronous training"
                )
        for turn, values in enumerate(batch.answer_log_likelihood):
            if not all(map(math.isfinite, values)) or not math.isfinite(batch.advantages[turn]):
                raise ValueError(
                    f"turn {turn} has a log-likelihood or advantage that is not finite: {list(values)}, "
                    f"{batch.advantages[turn]}; leave the turn out"
                )

    def _minibatches(self, turns: int) -> list[torch.Tensor]:
        """The turns of every optimiser step: minibatches of nearly equal size in a fresh order each epoch.

        A remainder of one turn would move the adapter as far as a full minibatch, by AdamW's nature.
        """
        device = self.encoder.base.model.device
        parts = math.ceil(turns / (self.minibatch_size or turns))
        orders = [torch.randperm(turns, generator=self.generator) for _ in range(self.epochs)]
        return [rows.sort().values.to(device) for order in orders for rows in order.tensor_split(parts)]

    def _served_log_probs(
        self, data: BatchTensors, versions: Sequence[int], minibatches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """log p_old(d|q) under the adapter that served each turn, ``(turns, candidates)``; padding holds -inf.

        A turn whose scores are not finite is NaN throughout.
        """
        current, current_version = self.encoder.adapter_state(), self.encoder.adapter_version
        out = torch.full(data.mask.shape, -torch.inf, device=data.mask.device)
        wanted = torch.tensor(list(versions), device=data.mask.device)
        first_epoch = minibatches[: len(minibatches) // self.epochs]
        try:
            for version in sorted(set(versions)):
                self.encoder.set_adapter_state(current if version == current_version else self.served[version], version)
                parts = [rows[wanted[rows] == version] for rows in first_epoch]
                log_probs = self.learner.log_probs(data, [rows for rows in parts if len(rows)])
                out = torch.where((wanted == version).unsqueeze(1), log_probs, out)
        finally:
            self.encoder.set_adapter_state(current, current_version)
        return out

    def _watch(self, data: BatchTensors, log_probs: torch.Tensor | None, metrics: dict[str, float]) -> dict[str, float]:
        """Drift, the share of distinct top-1 documents under the serving adapter, and whether it collapses."""
        change = sum((p.detach() - self.initial[n]).square().sum() for n, p in self.parameters.items())
        start = sum(value.square().sum() for value in self.initial.values())
        drift = float((change / start).sqrt())
        top = None if log_probs is None else data.top_documents(log_probs)
        if top is None or not len(top):  # no scores: the only step was dropped, or no turn's are finite
            return {"bridge/adapter_drift": drift, "bridge/collapsed": float(self.collapsed)}
        documents = top.unique().numel()
        reason = self.watch.check(
            documents=documents,
            queries=len(top),
            entropy=metrics.get("bridge/retrieval_entropy"),
            candidates=float(data.mask.sum(dim=-1).float().mean()),
            drift=drift,
        )
        if reason is not None and not self.collapsed:
            logger.warning(
                "THE RETRIEVER COLLAPSES: %s. Go back to an earlier checkpoint, with a smaller verl_bridge.bridge.lr.",
                reason,
            )
        self.collapsed = reason is not None
        return {
            "bridge/adapter_drift": drift,
            "bridge/distinct_top1_share": documents / len(top),
            "bridge/collapsed": float(self.collapsed),
        }

    # ---- saving and resuming ----------------------------------------------------------------------------------

    def state(self) -> LearnerState:
        """A copy of all that :meth:`set_state` needs."""
        numbers: dict[str, float] = {**self.counters, "adapter_version": self.encoder.adapter_version}
        if self.watch.first_share is not None:
            numbers |= {"first_top1_share": self.watch.first_share, "first_top1_documents": self.watch.first_documents}
        adapters = {"adapter": self.encoder.adapter_state(), "initial": self.initial}
        adapters |= {f"served/{version}": state for version, state in self.served.items()}
        moments = {"optimizer": optimizer_moments(self.learner.optimizer, self.parameters)}
        return LearnerState(adapters, moments, self.generator.get_state(), numbers)

    def set_state(self, state: LearnerState) -> None:
        """Continues from :meth:`state` as if never interrupted. Raises ValueError, nothing changed, if it misfits."""
        counters = ("adapter_version", *self.counters)
        state.check(self.parameters, lower=self.two_states, counters=counters)
        self._put_back(state)

    def _put_back(self, state: LearnerState) -> None:
        """As :meth:`set_state`, for a state that is known to fit."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.encoder.set_adapter_state(state.adapters["adapter"], int(state.numbers["adapter_version"]))
        device = self.encoder.base.model.device
        kept = {
            name: {key: value.to(device) for key, value in adapter.items()} for name, adapter in state.adapters.items()
        }
        self.initial = kept["initial"]
        self.served = {
            int(name.removeprefix("served/")): adapter for name, adapter in kept.items() if name.startswith("served/")
        }
        set_moments(self.learner.optimizer, self.parameters, state.moments.get("optimizer", {}))
        self.generator.set_state(state.rng)
        self.counters = {key: int(state.numbers[key]) for key in self.counters}
        self.watch.first_share = state.numbers.get("first_top1_share")
        self.watch.first_documents = state.numbers.get("first_top1_documents")
        self.collapsed = False

    def state_bytes(self) -> bytes:
        """Everything of :meth:`save` as one safetensors file in memory."""
        return self.state().to_bytes()

    def load_state_bytes(self, data: bytes) -> None:
        """Continues from :meth:`state_bytes`. Raises ValueError, nothing changed, for damaged bytes or a misfit."""
        try:
            self.set_state(LearnerState.from_bytes(data))
        except ValueError as error:
            raise ValueError(f"this retriever state cannot be used: {error}") from error

    def save(self, directory: str | os.PathLike) -> None:
        """Writes a checkpoint folder with the adapter in ``adapter/`` (PEFT format); it appears when complete.

        Raises:
            OSError: it cannot be written; what was there before is unchanged.
        """
        self.state().save(directory, self.encoder)

    def load(self, directory: str | os.PathLike) -> None:
        """Continues from what :meth:`save` wrote. Raises ValueError, nothing changed, if it is damaged or misfits."""
        try:
            self.set_state(LearnerState.load(directory, self.encoder))
        except ValueError as error:
            raise ValueError(f"no retriever checkpoint to continue from at {directory}: {error}") from error
