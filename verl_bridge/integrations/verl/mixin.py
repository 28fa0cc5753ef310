"""verl's trainer with BRIDGE and GCA between the base advantage and the policy update.

One batch walks: rollouts with traces → verl's own advantage → retriever update (BRIDGE) → grounded advantages (GCA) →
verl's own policy update → the next rollouts are served by the new adapter. ``bridge.schedule`` changes who learns when.

``verl.trainer.ppo.v1`` is not imported here: our trainers are registered when it is, and they need this module then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from math import lcm
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.rollout.utils import get_max_position_embeddings

from verl_bridge import credit
from verl_bridge.bilevel.schedule import (
    PHASED,
    Learners,
    count_updates,
    first_phase_steps,
    learners,
    update_is_due,
)
from verl_bridge.config import load_settings
from verl_bridge.integrations.checks import check_gold_answers, read_probe
from verl_bridge.integrations.methods import SearchMethods
from verl_bridge.integrations.retriever_step import Correction, RetrieverStep
from verl_bridge.integrations.rollout_batch import RolloutBatch
from verl_bridge.integrations.verl.checks import prepare_config
from verl_bridge.integrations.verl.correction_rows import correction_rows
from verl_bridge.integrations.verl.rollouts import read_rollouts, write_advantages
from verl_bridge.integrations.verl.salience import ENTROPY, MARGIN, asking_for_salience
from verl_bridge.integrations.verl.scoring import answer_log_probs, data_parallel_size

logger = logging.getLogger(__name__)


class SearchTrainerMixin(SearchMethods):
    """The methods' hooks over one of verl's trainer modes, ``verl_mode``."""

    verl_mode: ClassVar[str]
    _held: tuple[Any, ...] | None = None  # schedule joint: the batch the retriever learns from after the policy
    _correction: Correction | None = None  # estimator two_state: what the next policy update carries

    def __init__(self, config: DictConfig) -> None:
        self.settings = load_settings(config)
        self.base_estimator = prepare_config(config, self.settings, self.verl_mode)
        self.probe = read_probe(self.settings.retriever.probe)
        super().__init__(config)
        if os.environ.get("VERL_PLATFORM") == "cpu":
            # verl looks for finished rollouts every 2 s and has no key for it: far too long for a step of seconds.
            self.replay_buffer.poll_interval = 0.05

    @property
    def _weighs_tokens(self) -> bool:
        """Whether GCA needs the old policy's logits."""
        return self.settings.gca.enable and self.settings.gca.salience == "margin_entropy"

    @property
    def _learners(self) -> Learners:
        """Who learns in this step."""
        if not self._trains_adapter:
            return Learners(policy=True, retriever=False)
        return learners(self.settings.bridge.schedule, self.global_steps, first_phase=self.first_phase)

    @property
    def _update_is_due(self) -> bool:
        return self._learners.retriever and update_is_due(
            self.global_steps,
            local_step=self.local_trigger_step,
            batches_per_step=self.parameter_sync_step,
            interval=self.settings.bridge.interval,
        )

    # ---- verl's hooks -----------------------------------------------------------------------------------------

    def init(self) -> None:
        try:
            super().init()
        except BaseException:
            self._stop_serving()  # fit, which ends the serving otherwise, is never reached
            raise

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        for key, dataset in (("train_files", self.train_dataset), ("val_files", self.val_dataset)):
            check_gold_answers(f"data.{key}", dataset.dataframe)
        bridge, seed = self.settings.bridge, self.config.data.get("seed") or 0
        self.first_phase = first_phase_steps(bridge.schedule, bridge.schedule_steps, self.total_training_steps)
        self.retrieval = self._start_retrieval(  # not before the run's length is known
            seed,
            total_updates=count_updates(
                bridge.schedule,
                total_steps=self.total_training_steps,
                first_phase=self.first_phase,
                batches_per_step=self.parameter_sync_step,
                interval=bridge.interval,
            ),
            max_staleness=0 if self.verl_mode == "sync" else bridge.max_staleness,
        )

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        bridge = self.settings.bridge
        if self._trains_adapter and self.global_steps > 0 and bridge.schedule in PHASED and not bridge.schedule_steps:
            logger.warning(
                "resumed with verl_bridge.bridge.schedule_steps=null: the first phase of schedule=%s is half of "
                "trainer.total_training_steps=%d, %d steps, whatever it was before; set schedule_steps if that was "
                "another run's length",
                bridge.schedule,
                self.total_training_steps,
                self.first_phase,
            )

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if os.environ.get("VERL_PLATFORM") == "cpu":
            from verl_bridge.integrations.verl import cpu

            cpu.swap_cpu_workers(self)

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)
        if self._held is not None:
            held, self._held = self._held, None
            metrics.update(self._update_retriever(*held))
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self._weighs_tokens:
            return super()._compute_old_log_prob(batch, metrics)
        gca = self.settings.gca
        with asking_for_salience(batch, margin_k=gca.margin_k, entropy_m=gca.entropy_m):
            return super()._compute_old_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        bypass = (self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False)
        columns = [*([] if bypass else ["entropy"]), *([MARGIN, ENTROPY] if self._weighs_tokens else [])]
        with marked_timer("gca", self.timing_raw):  # with _ground below, all that GCA and its metrics take
            rollouts = read_rollouts(batch, columns)
            advantages, signals = self._assess(rollouts, metrics)
        if self._trains_adapter and self.settings.bridge.schedule in PHASED:
            metrics["bridge/schedule/policy_learns"] = float(self._learners.policy)
            metrics["bridge/schedule/retriever_learns"] = float(self._learners.retriever)
        if self._update_is_due:
            if self._learners.policy_first:
                self._held = (rollouts, signals, advantages)
            else:
                metrics.update(self._update_retriever(rollouts, signals, advantages))
        if self.settings.gca.enable:
            with marked_timer("gca", self.timing_raw):
                metrics.update(self._ground(batch, rollouts, signals))
        self._save_traces(rollouts, signals, self.local_trigger_step if self.parameter_sync_step > 1 else None)
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return super()._update_critic(batch, metrics) if self._learners.policy else batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if not self._learners.policy:
            return batch
        correction, self._correction = self._correction, None
        if correction is None:
            return super()._update_actor(batch, metrics)
        with self._corrected(batch, correction) as larger:
            super()._update_actor(larger, metrics)
        metrics["bridge/correction/rows"] = float(len(larger) - len(batch))
        return batch

    # ---- the methods ------------------------------------------------------------------------------------------

    @cached_property
    def _model_tokens(self) -> int:
        """Positions that the policy has."""
        model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)  # verl's trainer keeps only the tokenizer
        return get_max_position_embeddings(model.hf_config)

    def _retriever_step(self) -> RetrieverStep:
        bridge, rollout = self.settings.bridge, self.config.actor_rollout_ref.rollout
        key, budget = "verl_bridge.bridge.micro_batch_tokens", bridge.micro_batch_tokens
        if budget is None:
            key = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
            budget = rollout.log_prob_max_token_len_per_gpu
        # rollout.max_model_len bounds who generates, not who scores
        limits = {key: budget, "the policy's max_position_embeddings": self._model_tokens}
        if bridge.estimator == "two_state":  # its sequences may have to fit the policy update's micro-batches, too
            actor_key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
            limits[actor_key] = self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        score = partial(
            answer_log_probs, self.actor_rollout_wg, temperature=rollout.temperature, max_token_len_per_gpu=budget
        )
        return self._step_with(score, limits=limits, synchronous=self.verl_mode == "sync")

    def _update_retriever(
        self, rollouts: RolloutBatch, signals: credit.BatchSignals, advantages: torch.Tensor
    ) -> dict[str, float]:
        """BRIDGE: score the gold under every candidate with the policy as it is now, then step the retriever.

        ``advantages`` ``(batch,)`` are the rollouts' :func:`~verl_bridge.credit.trajectory_advantages`.
        """
        rl_mask = self._rl_mask(rollouts, signals)
        batch_number = self.global_steps * self.parameter_sync_step + self.local_trigger_step
        result = self._retriever_step()(rollouts, advantages, rl_mask, seed=batch_number, timing=self.timing_raw)
        self._correction = result.correction
        return result.metrics

    @contextmanager
    def _corrected(self, batch: KVBatchMeta, correction: Correction) -> Iterator[KVBatchMeta]:
        """Within it the batch has the correction's rows, and verl's mini-batches are as much larger."""
        config = self.config.actor_rollout_ref
        actor, n, ranks = config.actor, config.rollout.n, data_parallel_size(self.actor_rollout_wg)
        micro = 1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
        policy_rows = actor.ppo_mini_batch_size
        with correction_rows(
            batch,
            correction,
            loss_agg_mode=actor.loss_agg_mode,
            mini_batch_rows=policy_rows * n,
            ranks=ranks,
            multiple=lcm(ranks * micro, n),
            pad_token=self.tokenizer.eos_token_id,
        ) as (larger, rows):
            actor.ppo_mini_batch_size = rows // n  # verl multiplies by n again
            try:
                yield larger
            finally:
                actor.ppo_mini_batch_size = policy_rows

    def _ground(self, batch: KVBatchMeta, rollouts: RolloutBatch, signals: credit.BatchSignals) -> dict[str, float]:
        """GCA: replace the advantages of the batch by grounded ones."""
        result = self._grounded(
            rollouts,
            signals,
            margin=rollouts.columns.get(MARGIN),
            top_entropy=rollouts.columns.get(ENTROPY),
            entropy=rollouts.columns.get("entropy"),
        )
        write_advantages(batch, rollouts, result.advantages)
        return result.metrics
