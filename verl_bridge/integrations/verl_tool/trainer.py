"""verl-tool's trainer with BRIDGE and GCA between the rewards and the policy update.

Its last hook before the advantages (``compute_rollout_importance_weights_and_add_to_batch``) sees the whole batch and
may add metrics; an estimator sees only rewards and masks. So the hook asks verl for the base advantages, lets the
retriever learn, grounds the advantages, and the estimator ``verl_bridge_prepared`` hands out what the hook has made.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, open_dict
from verl import DataProto
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.debug import marked_timer
from verl_tool.trainer.ppo.ray_trainer import AgentRayPPOTrainer

from verl_bridge.bilevel.schedule import count_updates
from verl_bridge.config import load_settings
from verl_bridge.integrations.checks import check_gold_answers, read_probe
from verl_bridge.integrations.methods import SearchMethods
from verl_bridge.integrations.retriever_step import RetrieverStep
from verl_bridge.integrations.verl_tool import ESTIMATOR
from verl_bridge.integrations.verl_tool.batch import answer_log_probs, read_rollouts
from verl_bridge.integrations.verl_tool.checks import base_estimator, check_tool_server

_prepared: dict[str, torch.Tensor] = {}  # advantages and returns  # (batch, response)


@register_adv_est(ESTIMATOR)
def prepared_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the trainer's hook has made of this very batch. Raises RuntimeError without it."""
    if _prepared.get("response_mask") is not response_mask:
        raise RuntimeError(f"algorithm.adv_estimator={ESTIMATOR} is the trainer's own: set an estimator of verl's")
    made = _prepared["advantages"], _prepared["returns"]
    _prepared.clear()
    return made


class BridgeTrainer(SearchMethods, AgentRayPPOTrainer):
    """verl-tool's trainer with the methods; put in its place by ``main_ppo``."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        self.settings = load_settings(config)
        self.base_estimator = base_estimator(config, self.settings)
        self.probe = read_probe(self.settings.retriever.probe)
        super().__init__(config, *args, **kwargs)
        for key, dataset in (("train_files", self.train_dataset), ("val_files", self.val_dataset)):
            check_gold_answers(f"data.{key}", dataset.dataframe)
        if self.settings.gca.enable:  # after the constructor: whether there is a critic is told by verl's own name
            with open_dict(config):
                config.algorithm.adv_estimator = ESTIMATOR

    # ---- verl-tool's hooks ------------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Starts the learner, checks that the tool server asks the retriever it learns for, then the workers."""
        retriever, bridge = self.settings.retriever, self.settings.bridge
        if retriever.url is not None:
            updates = count_updates(
                bridge.schedule, total_steps=self.total_training_steps, first_phase=0, interval=bridge.interval
            )
            seed = self.config.data.get("seed") or 0
            self.retrieval = self._start_retrieval(seed, total_updates=updates, max_staleness=0)
        try:
            check_tool_server(
                self.config.actor_rollout_ref.agent.tool_server_url,
                shown=retriever.shown,
                versions=self.retrieval.known_versions() if self._trains_adapter else None,
            )
            super().init_workers()
        except BaseException:
            self._stop_serving()  # fit, which ends the serving otherwise, is never reached
            raise

    def compute_rollout_importance_weights_and_add_to_batch(self, batch: DataProto) -> tuple[DataProto, dict]:
        """verl's own weights; then both methods on the batch. Their metrics are logged with verl's."""
        batch, metrics = super().compute_rollout_importance_weights_and_add_to_batch(batch)
        timing: dict[str, float] = {}
        algorithm = self.config.algorithm
        with marked_timer("gca", timing):
            batch = compute_advantage(
                batch,
                adv_estimator=self.base_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
                config=algorithm,
            )
            rollouts = read_rollouts(batch)
            advantages, signals = self._assess(rollouts, metrics)
        metrics["search/masked_share"] = float((rollouts.response_mask.sum(-1) == 0).float().mean())
        if self._trains_adapter and self.global_steps % self.settings.bridge.interval == 0:
            # a rollout that the tool server failed is out of the loss, and its reward is nobody's doing
            rl_mask = self._rl_mask(rollouts, signals) & rollouts.response_mask.bool().any(-1)
            result = self._retriever_step()(rollouts, advantages, rl_mask, seed=self.global_steps, timing=timing)
            metrics.update(result.metrics)
        if self.settings.gca.enable:
            with marked_timer("gca", timing):
                grounded = self._grounded(rollouts, signals)
            metrics.update(grounded.metrics)
            _prepared.update(
                response_mask=batch.batch["response_mask"],
                advantages=grounded.advantages,
                returns=batch.batch["returns"],
            )
        self._save_traces(rollouts, signals)
        return batch, {**metrics, **{f"timing_s/{name}": seconds for name, seconds in timing.items()}}

    # ---- the retriever ----------------------------------------------------------------------------------------

    def _retriever_step(self) -> RetrieverStep:
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        key = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
        return self._step_with(
            partial(answer_log_probs, self.actor_rollout_wg, pad_token=pad),
            limits={key: self.config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu},
            synchronous=True,
        )
