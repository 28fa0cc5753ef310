"""What the methods do with one batch of rollouts, in every host's trainer alike.

A host's trainer inherits :class:`SearchMethods` beside its own base class, and says when: it unpacks its batch into a
:class:`~verl_bridge.integrations.rollout_batch.RolloutBatch`, calls these, and puts what they return back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl_bridge import credit
from verl_bridge.algorithms.gca import GCAResult
from verl_bridge.algorithms.grounding import grounding_metrics
from verl_bridge.bilevel.schedule import check_course, retriever_objective
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.integrations.checks import GROUP_RELATIVE, trains_adapter
from verl_bridge.integrations.retrieval import Probe, TrainerRetrieval
from verl_bridge.integrations.retriever_step import RetrieverStep, Score
from verl_bridge.integrations.rollout_batch import RolloutBatch, save_rollouts
from verl_bridge.integrations.tokens import encode_text
from verl_bridge.qa.signals import tool_use_warning

logger = logging.getLogger(__name__)


class SearchMethods:
    """Beside the host's trainer, and before it in the list of bases.

    The host's trainer gives ``config``, ``tokenizer``, ``global_steps`` and ``total_training_steps``, its ``__init__``
    the rest.

    Args:
        settings: the checked ``verl_bridge`` section.
        base_estimator: verl's name of the estimator that GCA builds on.
        probe: (query, aliases) whose recall is logged at validations.
        retrieval: who learns and serves; None before it is started, and where a host's run needs none.
    """

    config: Any
    tokenizer: Any
    global_steps: int
    total_training_steps: int
    settings: VerlBridgeConfig
    base_estimator: str
    probe: Probe
    retrieval: TrainerRetrieval | None = None
    _has_trained: bool = False  # on a batch, in this process

    @property
    def _trains_adapter(self) -> bool:
        return trains_adapter(self.settings)

    @property
    def _unicode_aliases(self) -> bool:
        return self.settings.gca.alias_matching == "unicode"

    @property
    def _group_relative(self) -> bool:
        return self.base_estimator in GROUP_RELATIVE

    # ---- the host's hooks, alike in all of them ---------------------------------------------------------------

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        if self.probe:
            found = self.retrieval.recall(self.probe, self.settings.retriever.shown)
            metrics.update({f"val/retrieval/{name}": value for name, value in found.items()})
        return metrics

    def _save_checkpoint(self) -> None:
        # Before verl writes its "latest" marker: a step that counts as saved has its adapter beside it.
        if self._trains_adapter:
            self.retrieval.save(self._checkpoint_folder(self.global_steps))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self._trains_adapter and self.global_steps > 0:
            self.retrieval.load(self._checkpoint_folder(self.global_steps, resumed=True))

    def fit(self, *arguments: Any, **keywords: Any) -> None:
        """The host's training. The adapter is saved at its end, unless nothing was trained on (``val_only``)."""
        try:
            super().fit(*arguments, **keywords)
            if self._trains_adapter and self._has_trained:
                self.retrieval.save_adapter(self._run_folder() / "adapter")
        finally:
            self._stop_serving()

    def _stop_serving(self) -> None:
        if self.retrieval is not None:
            self.retrieval.stop()

    # ---- the retriever ----------------------------------------------------------------------------------------

    def _updater(self, seed: int, *, total_updates: int, max_staleness: int) -> Any:
        """Makes the learner from (query encoder, index).

        Args:
            seed: of the order in which turns are visited.
            total_updates: of the whole run, for the learning rate's course.
            max_staleness: see ``bridge.max_staleness``; 0 where rollouts are always served by the newest version.

        Raises:
            ConfigError: the learning rate's course does not fit so many updates.
        """
        from verl_bridge.bilevel.two_state import TwoStateUpdater
        from verl_bridge.bilevel.updater import RetrieverUpdater

        bridge = self.settings.bridge
        check_course(bridge, updates=total_updates, total_steps=self.total_training_steps)
        names = "lr gamma tau_retrieval tau_posterior tau_likelihood clip credit_weights minibatch_size epochs".split()
        names += "lr_schedule lr_warmup weight_decay max_grad_norm compute_dtype".split()
        two = bridge.estimator == "two_state"
        return partial(
            TwoStateUpdater if two else RetrieverUpdater,
            **{name: getattr(bridge, name) for name in names},
            **({} if two else {"objective": retriever_objective(bridge.schedule, bridge.estimator)}),
            total_updates=total_updates,
            max_staleness=max_staleness,
            seed=seed,
        )

    def _start_retrieval(self, seed: int, **updater: Any) -> TrainerRetrieval:
        """Starts whoever serves and learns; ``updater`` are the keywords of :meth:`_updater`."""
        bridge = self.settings.bridge
        return TrainerRetrieval(
            self.settings.retriever,
            seed=seed,
            updater=self._updater(seed, **updater) if self._trains_adapter else None,
            worker=bridge.worker,
            device=bridge.device,
            num_gpus=bridge.num_gpus,
            num_cpus=bridge.num_cpus,
        )

    def _step_with(self, score: Score, *, limits: Mapping[str, int], synchronous: bool) -> RetrieverStep:
        """A retriever step by the settings.

        Args:
            score: see :class:`~verl_bridge.integrations.retriever_step.RetrieverStep`, as is ``synchronous``.
            limits: tokens that a scored sequence may have, by the setting that says so; the smallest counts.
        """
        bridge, limit = self.settings.bridge, min(limits, key=limits.__getitem__)
        return RetrieverStep(
            retrieval=self.retrieval,
            score=score,
            tokenize=partial(encode_text, self.tokenizer),
            synchronous=synchronous,
            prefix=bridge.likelihood_context == "prefix",
            all_golds=bridge.golds == "best",
            length_normalize=bridge.length_normalize,
            token_budget=bridge.token_budget,
            max_tokens=limits[limit],
            max_tokens_key=limit,
            query_input=self.settings.retriever.query_input,
            unicode=self._unicode_aliases,
            correction_scale=bridge.gamma / bridge.tau_likelihood,
        )

    # ---- one batch --------------------------------------------------------------------------------------------

    def _assess(self, rollouts: RolloutBatch, metrics: dict) -> tuple[torch.Tensor, credit.BatchSignals]:
        """The rollouts' advantages ``(batch,)`` and what their traces say; their metrics are added. Training begins so.

        Raises:
            RuntimeError: every search failed.
        """
        self._has_trained = True
        advantages = credit.trajectory_advantages(
            self.base_estimator,
            rollouts.advantages,
            rollouts.response_mask,
            rollouts.rewards,
            rollouts.group_index,
        )
        signals = self._signals(rollouts)
        metrics.update(credit.search_metrics(rollouts.traces))
        metrics.update(
            grounding_metrics(
                signals.hit,
                signals.correct,
                signals.types,
                rollouts.group_index,
                rollouts.rewards,
                outcome_advantages=advantages,
            )
        )
        if warning := tool_use_warning(rollouts.traces):
            logger.warning(warning)
        if metrics["search/failed_share"] == 1:
            raise RuntimeError(
                f"every search of step {self.global_steps} failed: the retriever is down; "
                "its errors are in the log of the agent loop workers"
            )
        return advantages, signals

    def _rl_mask(self, rollouts: RolloutBatch, signals: credit.BatchSignals) -> torch.Tensor:
        """See :func:`~verl_bridge.credit.rl_mask`; ``(batch,)`` bool."""
        return credit.rl_mask(
            signals,
            rollouts.group_index,
            rollouts.rewards,
            group_relative=self._group_relative,
            settings=self.settings.gca,
        )

    def _grounded(
        self, rollouts: RolloutBatch, signals: credit.BatchSignals, **statistics: torch.Tensor | None
    ) -> GCAResult:
        """GCA; ``statistics`` are the token statistics of :func:`~verl_bridge.credit.ground`."""
        return credit.ground(
            rollouts.traces,
            signals,
            rollouts.advantages,
            rollouts.response_mask,
            rollouts.group_index,
            rollouts.rewards,
            group_relative=self._group_relative,
            settings=self.settings.gca,
            **statistics,
        )

    def _signals(self, rollouts: RolloutBatch) -> credit.BatchSignals:
        """Sub-outcomes and types of the batch, with the oracle's word where it is on."""
        hit, known = self._oracle_hits(rollouts) if self.settings.gca.oracle_query else (None, None)
        return credit.batch_signals(
            rollouts.traces,
            rollouts.group_index,
            oracle_hit=hit,
            oracle_known=known,
            unicode=self._unicode_aliases,
        )

    def _oracle_hits(self, rollouts: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether question and gold together find an alias, and whether that was answered, (batch,) bool each.

        Asked in one call for all groups where a type hangs on it; a search that failed has answered nothing.
        """
        asked = credit.oracle_queries(rollouts.traces, rollouts.group_index, unicode=self._unicode_aliases)
        found = self.retrieval.search([query for query, _ in asked.values()], self.settings.retriever.shown)
        return credit.oracle_hits(asked, found, rollouts.group_index, unicode=self._unicode_aliases)

    # ---- what a run leaves behind -----------------------------------------------------------------------------

    def _run_folder(self) -> Path:
        return Path(self.settings.run_dir or Path(self.config.trainer.default_local_dir) / "verl_bridge").absolute()

    def _checkpoint_folder(self, step: int, resumed: bool = False) -> Path:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{step}"
        if resumed and self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path)
        return folder.absolute() / "retriever"

    def _save_traces(self, rollouts: RolloutBatch, signals: credit.BatchSignals, part: int | None = None) -> None:
        """``rollouts/step_N.jsonl``, or ``step_N_I.jsonl`` for batch I (``part``) of a step that has several."""
        interval = self.settings.trace_interval
        if interval == 0 or self.global_steps % interval:
            return
        batch = "" if part is None else f"_{part}"
        file = self._run_folder() / "rollouts" / f"step_{self.global_steps:06d}{batch}.jsonl"
        save_rollouts(file, rollouts, signals.types, step=self.global_steps)
