"""What must hold before a run starts, and the config as verl has to see it. Every refusal names key, value and fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig, open_dict

from verl_bridge.config import VerlBridgeConfig
from verl_bridge.config.schema import ConfigError
from verl_bridge.plugin import AGENT_LOOP, ESTIMATOR

#: Policy losses that average or branch on advantages again, so that a token's residual would not reach its gradient.
UNFIT_LOSSES = ("geo_mean", "clip_cov", "kl_cov")


def prepare_config(config: DictConfig, settings: VerlBridgeConfig, verl_mode: str) -> str:
    """Check ``config`` and turn it into one that verl's own ``verl_mode`` trainer understands; the base estimator.

    verl compares ``trainer_mode`` and ``adv_estimator`` with its own names in many places, so ours are replaced by the
    mode we extend and the estimator we build on.

    Raises:
        ConfigError: a setting the methods cannot work with.
    """
    for name in ("encoder", "index", "corpus"):
        if getattr(settings.retriever, name) is None:
            raise ConfigError(
                f"verl_bridge.retriever.{name} is not set: give its path "
                "(`verl-bridge index build` makes an index from a corpus and an encoder)"
            )
    asked = str(config.algorithm.adv_estimator)
    if asked == ESTIMATOR and not settings.gca.enable:
        raise ConfigError(
            f"algorithm.adv_estimator={ESTIMATOR} but verl_bridge.gca.enable=false: set verl_bridge.gca.enable=true "
            "or name another estimator"
        )
    base = settings.gca.base_estimator or ("grpo" if asked == ESTIMATOR else asked)
    if base == ESTIMATOR:
        raise ConfigError(f"verl_bridge.gca.base_estimator={base!r}: it needs an estimator to build on, such as grpo")
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if settings.gca.enable and loss in UNFIT_LOSSES:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss} averages or branches on advantages again, which "
            "undoes GCA's residual: use vanilla or gspo, or verl_bridge.gca.enable=false"
        )
    default_loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if default_loop != AGENT_LOOP:
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={default_loop} writes no search traces: "
            f"set it to {AGENT_LOOP}"
        )
    with open_dict(config):
        config.trainer.v1.trainer_mode = verl_mode
        config.algorithm.adv_estimator = base
    return base


def check_gold_answers(key: str, rows: Iterable[dict[str, Any]]) -> None:
    """Raise ConfigError at the first row of a dataset without gold answers in Search-R1's column."""
    for number, row in enumerate(rows):
        truth = (row.get("reward_model") or {}).get("ground_truth")
        target = truth.get("target") if isinstance(truth, dict) else truth
        if target is None or len(target) == 0 or (not isinstance(target, str) and not any(map(str.strip, target))):
            raise ConfigError(
                f"{key}: row {number} has reward_model.ground_truth={truth!r} and so no gold answers: every row needs "
                "reward_model={'ground_truth': {'target': ['answer', 'alias', ...]}}"
            )
