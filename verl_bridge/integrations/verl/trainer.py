"""verl's trainer with BRIDGE and GCA between the base advantage and the policy update.

One batch walks: rollouts with traces → verl's own advantage → retriever update (BRIDGE) → grounded advantages (GCA) →
verl's own policy update → the next rollouts are served by the new adapter.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.debug import marked_timer

from verl_bridge import credit
from verl_bridge.algorithms.grounding import RolloutType, grounding_metrics
from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.likelihood import RetrievalTurn, plan_likelihoods
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.config import VerlBridgeConfig, load_settings
from verl_bridge.files import new_file
from verl_bridge.integrations.verl.agent_loop import encode_text
from verl_bridge.integrations.verl.checks import GROUP_RELATIVE, check_gold_answers, prepare_config, read_probe
from verl_bridge.integrations.verl.retrieval import TrainerRetrieval
from verl_bridge.integrations.verl.rollouts import RolloutBatch, read_rollouts, write_advantages
from verl_bridge.integrations.verl.salience import ENTROPY, MARGIN, asking_for_salience
from verl_bridge.integrations.verl.scoring import score_answers
from verl_bridge.plugin import TRAINER
from verl_bridge.qa.answers import alias_hit
from verl_bridge.qa.signals import tool_use_warning
from verl_bridge.retrieval.corpus import Document
from verl_bridge.retrieval.retriever import search_text

logger = logging.getLogger(__name__)


class SearchTrainerMixin:
    """The methods' hooks over one of verl's trainer modes, ``verl_mode``."""

    verl_mode: ClassVar[str]
    settings: VerlBridgeConfig

    def __init__(self, config: DictConfig) -> None:
        self.settings = load_settings(config)
        self.base_estimator = prepare_config(config, self.settings, self.verl_mode)
        seed = config.data.get("seed") or 0
        self.probe = read_probe(self.settings.retriever.probe)
        self.retrieval = TrainerRetrieval(
            self.settings.retriever, seed=seed, updater=self._updater(seed) if self.settings.bridge.enable else None
        )
        self.retriever = self.retrieval.actor
        try:
            super().__init__(config)
        except BaseException:
            self.retrieval.stop()  # fit, which ends the serving otherwise, is never reached
            raise
        if os.environ.get("VERL_PLATFORM") == "cpu":
            # verl looks for finished rollouts every 2 s and has no key for it: far too long for a step of seconds.
            self.replay_buffer.poll_interval = 0.05

    @property
    def _weighs_tokens(self) -> bool:
        """Whether GCA needs the old policy's logits."""
        return self.settings.gca.enable and self.settings.gca.salience == "margin_entropy"

    @property
    def _unicode_aliases(self) -> bool:
        return self.settings.gca.alias_matching == "unicode"

    def _hit(self, title: str, text: str, golds: Sequence[str]) -> bool:
        return alias_hit(f"{title} {text}", golds, unicode=self._unicode_aliases)

    def _updater(self, seed: int) -> Any:
        bridge = self.settings.bridge
        return partial(
            RetrieverUpdater,
            lr=bridge.lr,
            gamma=bridge.gamma,
            tau_retrieval=bridge.tau_retrieval,
            tau_posterior=bridge.tau_posterior,
            tau_likelihood=bridge.tau_likelihood,
            clip=bridge.clip,
            credit_weights=bridge.credit_weights,
            minibatch_size=bridge.minibatch_size,
            epochs=bridge.epochs,
            seed=seed,
        )

    # ---- verl's hooks -----------------------------------------------------------------------------------------

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        for key, dataset in (("train_files", self.train_dataset), ("val_files", self.val_dataset)):
            check_gold_answers(f"data.{key}", dataset.dataframe)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if os.environ.get("VERL_PLATFORM") == "cpu":
            from verl_bridge.integrations.verl import cpu

            cpu.swap_cpu_workers(self)

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
        if self.settings.bridge.enable and self.global_steps % self.settings.bridge.interval == 0:
            metrics.update(self._update_retriever(rollouts, signals, advantages))
        if self.settings.gca.enable:
            with marked_timer("gca", self.timing_raw):
                metrics.update(self._ground(batch, rollouts, signals))
        self._save_traces(rollouts, signals)
        return batch

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        if self.probe:
            found = self.retrieval.recall(self.probe, self.settings.retriever.shown)
            metrics.update({f"val/retrieval/{name}": value for name, value in found.items()})
        return metrics

    def _save_checkpoint(self) -> None:
        # Before verl writes its "latest" marker: a step that counts as saved has its adapter beside it.
        if self.settings.bridge.enable:
            ray.get(self.retriever.save.remote(str(self._checkpoint_folder(self.global_steps))))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.settings.bridge.enable and self.global_steps > 0:
            ray.get(self.retriever.load.remote(str(self._checkpoint_folder(self.global_steps, resumed=True))))
            self.retrieval.publish(begin=True)

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)
            if self.settings.bridge.enable:
                ray.get(self.retriever.save_adapter.remote(str(self._run_folder() / "adapter")))
        finally:
            self.retrieval.stop()

    # ---- the methods ------------------------------------------------------------------------------------------

    def _update_retriever(
        self, rollouts: RolloutBatch, signals: credit.BatchSignals, advantages: torch.Tensor
    ) -> dict[str, float]:
        """BRIDGE: score the gold under every candidate with the policy as it is now, then step the retriever.

        ``advantages`` ``(batch,)`` are the rollouts' :func:`~verl_bridge.credit.trajectory_advantages`.
        """
        searches = [
            (row, index, turn)
            for row, trace in enumerate(rollouts.traces)
            for index, turn in enumerate(trace.turns)
            if turn.kind == "search" and turn.status != "none"
        ]
        ids = list(dict.fromkeys(document for _, _, turn in searches for document in turn.candidate_ids))
        documents = dict(zip(ids, (Document(**d) for d in ray.get(self.retriever.documents.remote(ids))), strict=True))
        prefix = self.settings.bridge.likelihood_context == "prefix"
        turns = [
            RetrievalTurn(
                key=(row, index),
                context_ids=(
                    *rollouts.prompt_ids[row],
                    *(rollouts.response_ids[row][: turn.span[1]] if prefix else ()),
                ),
                candidates=tuple(documents[document] for document in turn.candidate_ids),
                gold=rollouts.traces[row].golden_answers[0],
                failed=turn.status == "error",
            )
            for row, index, turn in searches
        ]
        rollout = self.config.actor_rollout_ref.rollout
        budget = self.settings.bridge.token_budget or rollout.log_prob_max_token_len_per_gpu
        with marked_timer("likelihood", self.timing_raw):
            tokenize = partial(encode_text, self.tokenizer)
            plan = plan_likelihoods(turns, tokenize, after_query=prefix, max_tokens=budget, seed=self.global_steps)
            scored = score_answers(
                self.actor_rollout_wg,
                plan.sequences,
                temperature=rollout.temperature,
                max_token_len_per_gpu=budget,
            )
        metrics = {f"bridge/plan/{name}": float(value) for name, value in plan.metrics.items()}
        if not plan.turn_keys:
            return metrics
        of_rows = advantages.tolist()
        by_reward = credit.teaches_by_reward(
            signals,
            rollouts.group_index,
            rollouts.rewards,
            group_relative=self.base_estimator in GROUP_RELATIVE,
            settings=self.settings.gca,
        ).tolist()
        candidates = {turn.key: turn.candidates for turn in turns}
        served = [rollouts.traces[row].turns[index] for row, index in plan.turn_keys]
        update = RetrieverBatch(
            queries=[
                search_text(turn.query, rollouts.traces[row].question, self.settings.retriever.query_input)
                for (row, _), turn in zip(plan.turn_keys, served, strict=True)
            ],
            candidate_ids=[turn.candidate_ids for turn in served],
            answer_log_likelihood=plan.gather(scored),
            advantages=[of_rows[row] for row, _ in plan.turn_keys],
            rl_mask=[by_reward[row] for row, _ in plan.turn_keys],
            adapter_version=[turn.adapter_version for turn in served],
            hits=[
                [self._hit(d.title, d.text, rollouts.traces[key[0]].golden_answers) for d in candidates[key]]
                for key in plan.turn_keys
            ],
        )
        self.retrieval.check_served(update.adapter_version)
        with marked_timer("retriever_update", self.timing_raw):
            metrics.update(ray.get(self.retriever.update.remote(update)).metrics)
        if self.retrieval.publishes:
            with marked_timer("publish_adapter", self.timing_raw):
                self.retrieval.publish()
        return metrics

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
        hits = {
            group: any(self._hit(d["title"], d["text"], golds) for d in answer["documents"])
            for (group, (_, golds)), answer in zip(asked.items(), found, strict=True)
            if answer["status"] == "ok"
        }
        groups = rollouts.group_index.tolist()
        hit, known = [hits.get(group, False) for group in groups], [group in hits for group in groups]
        return torch.tensor(hit, dtype=torch.bool), torch.tensor(known, dtype=torch.bool)

    def _ground(self, batch: KVBatchMeta, rollouts: RolloutBatch, signals: credit.BatchSignals) -> dict[str, float]:
        """GCA: replace the advantages of the batch by grounded ones."""
        result = credit.ground(
            rollouts.traces,
            signals,
            rollouts.advantages,
            rollouts.response_mask,
            rollouts.group_index,
            rollouts.rewards,
            group_relative=self.base_estimator in GROUP_RELATIVE,
            settings=self.settings.gca,
            margin=rollouts.columns.get(MARGIN),
            top_entropy=rollouts.columns.get(ENTROPY),
            entropy=rollouts.columns.get("entropy"),
        )
        write_advantages(batch, rollouts, result.advantages)
        return result.metrics

    # ---- what a run leaves behind -----------------------------------------------------------------------------

    def _run_folder(self) -> Path:
        return Path(self.settings.run_dir or Path(self.config.trainer.default_local_dir) / "verl_bridge").absolute()

    def _checkpoint_folder(self, step: int, resumed: bool = False) -> Path:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{step}"
        if resumed and self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path)
        return folder.absolute() / "retriever"

    def _save_traces(self, rollouts: RolloutBatch, signals: credit.BatchSignals) -> None:
        """One JSON line a rollout in ``rollouts/step_N.jsonl``, every ``trace_interval`` steps."""
        interval = self.settings.trace_interval
        if interval == 0 or self.global_steps % interval:
            return
        types = [RolloutType(code).name for code in signals.types.tolist()]
        lines = [
            json.dumps(
                {"step": self.global_steps, "uid": uid, "reward": reward, "type": kind, "trace": trace.to_dict()},
                ensure_ascii=False,
            )
            for uid, reward, kind, trace in zip(
                rollouts.uids, rollouts.rewards.tolist(), types, rollouts.traces, strict=True
            )
        ]
        with new_file(self._run_folder() / "rollouts" / f"step_{self.global_steps:06d}.jsonl") as file:
            file.writelines(line + "\n" for line in lines)


@register_trainer(TRAINER)
class BridgeTrainerSync(SearchTrainerMixin, PPOTrainerSync):
    """``trainer.v1.trainer_mode=bridge_sync``: verl's synchronous trainer with the methods."""

    verl_mode = "sync"
