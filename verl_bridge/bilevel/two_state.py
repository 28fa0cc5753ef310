"""The estimator ``two_state``: a second retriever state that follows only the RAG loss [paper].

"Estimators" in algorithms/README.md says what it is for. With η_γ = argmin F + γG and η* = argmin G, the policy's
gradient gains γ·[∇_θG(θ, η_γ) - ∇_θG(θ, η*)]. A turn's part of G has the derivative -post_d(η)/τ_l in ℓ_d, so all that
the policy needs of the two states is how their posteriors differ, ``UpdateResult.evidence_shift``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_bridge.algorithms.bridge import answer_posterior
from verl_bridge.bilevel.learner import AdapterLearner
from verl_bridge.bilevel.state import LearnerState, optimizer_moments, set_moments
from verl_bridge.bilevel.tensors import BatchTensors
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.retrieval.encoder import QueryEncoder
from verl_bridge.retrieval.index import DocumentIndex


class TwoStateUpdater(RetrieverUpdater):
    """A :class:`RetrieverUpdater` (η_γ, which serves) and beside it η*, stepped in turn on the same encoder.

    Document vectors are looked up and old log-probs computed once for both, and one graph is held at a time.

    Args:
        encoder, index: as there.
        settings: as there, without ``objective``: η_γ follows ``penalised`` and η* ``rag``, alike in all else.
    """

    two_states = True

    def __init__(self, encoder: QueryEncoder, index: DocumentIndex, **settings: Any) -> None:
        if settings.pop("objective", "penalised") != "penalised":
            raise ValueError("two states have objectives of their own; leave objective out")
        super().__init__(encoder, index, **settings)
        own = ("minibatch_size", "epochs", "max_staleness", "seed")
        learning = {key: value for key, value in settings.items() if key not in own}
        self.lower = AdapterLearner(encoder, objective="rag", **learning)
        self.lower_state = encoder.adapter_state()

    def _second_state(
        self, data: BatchTensors, minibatches: Sequence[torch.Tensor], updates: int
    ) -> tuple[dict[str, float], torch.Tensor | None, int]:
        shift = self._posterior(data)
        state, version = self.encoder.adapter_state(), self.encoder.adapter_version
        self.encoder.set_adapter_state(self.lower_state, version)
        # L_RAG knows no p_old
        trained = self.lower.train(data, minibatches, updates=updates)
        shift = shift - self._posterior(data)
        self.lower_state = self.encoder.adapter_state()
        self.encoder.set_adapter_state(state, version)
        metrics = {
            "bridge/lower/loss_rag": trained.metrics().get("bridge/loss_rag"),
            "bridge/lower/grad_norm": trained.metrics().get("bridge/grad_norm"),
            # half the sum of sizes: how much of the posterior lies elsewhere
            "bridge/evidence_shift": float(shift.nan_to_num().abs().sum(dim=-1).mean() / 2),
        }
        return {key: value for key, value in metrics.items() if value is not None}, shift, trained.dropped

    def _posterior(self, data: BatchTensors) -> torch.Tensor:
        """post_d under the encoder's adapter as it is, ``(turns, candidates)``; NaN where scores are not finite."""
        everything = torch.arange(len(data), device=data.mask.device)
        log_probs = self.learner.log_probs(data, [everything])
        bad = log_probs.isnan().any(dim=-1, keepdim=True)
        log_probs = log_probs.masked_fill(bad, 0.0)
        posterior = answer_posterior(log_probs, data.log_likelihood, data.mask, self.learner.tau_likelihood)
        return posterior.masked_fill(bad, torch.nan)

    # ---- saving and resuming ----------------------------------------------------------------------------------

    def state(self) -> LearnerState:
        """As of one state, with the second adapter and its moments."""
        state = super().state()
        state.adapters["lower"] = self.lower_state
        state.moments["lower_optimizer"] = optimizer_moments(self.lower.optimizer, self.lower.parameters)
        return state

    def _put_back(self, state: LearnerState) -> None:
        super()._put_back(state)
        device = self.encoder.base.model.device
        self.lower_state = {name: value.to(device) for name, value in state.adapters["lower"].items()}
        set_moments(self.lower.optimizer, self.lower.parameters, state.moments.get("lower_optimizer", {}))
