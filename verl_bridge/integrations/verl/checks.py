"""What must hold before a run starts, and the config as verl has to see it. Every refusal names key, value and fix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

from verl_bridge.config import VerlBridgeConfig
from verl_bridge.config.schema import ConfigError
from verl_bridge.plugin import AGENT_LOOP, ESTIMATOR, TRAINER
from verl_bridge.qa.questions import gold_answers

VERL_MODES = ("sync", "colocate_async", "separate_async")
#: verl's estimators whose advantage compares a rollout with the others of its prompt.
GROUP_RELATIVE = frozenset(
    {
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "rloo",
        "rloo_vectorized",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "gdpo",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    }
)
#: Policy losses that average or branch on advantages again, so that a token's residual would not reach its gradient.
UNFIT_LOSSES = ("geo_mean", "clip_cov", "kl_cov")


def prepare_config(config: DictConfig, settings: VerlBridgeConfig, verl_mode: str) -> str:
    """Check ``config`` and turn it into one that verl's own ``verl_mode`` trainer understands; the base estimator.

    verl compares ``trainer_mode`` and ``adv_estimator`` with its own names in many places, so ours are replaced by the
    mode we extend and the estimator we build on.

    Raises:
        ConfigError: a setting the methods cannot work with.
    """
    for name in ("index", "corpus"):
        if needs_files(settings) and getattr(settings.retriever, name) is None:
            served = " (the learner reads it, also where servers answer the searches)" if settings.retriever.url else ""
            raise ConfigError(
                f"verl_bridge.retriever.{name} is not set: give its path{served} "
                "(`verl-bridge index build` makes an index from a corpus and an encoder)"
            )
    if not config.trainer.use_v1:
        raise ConfigError("trainer.use_v1=false: the methods need verl's V1 trainer, set trainer.use_v1=true")
    mode = config.trainer.v1.trainer_mode
    if mode in VERL_MODES:
        raise ConfigError(f"trainer.v1.trainer_mode={mode} is verl's own trainer: set it to {TRAINER}")
    asked = str(config.algorithm.adv_estimator)
    named = settings.gca.base_estimator
    if named is not None and not settings.gca.enable:
        raise ConfigError(
            f"verl_bridge.gca.base_estimator={named!r} with verl_bridge.gca.enable=false would change the recipe's "
            "own estimator: set algorithm.adv_estimator instead"
        )
    base = named or ("grpo" if asked == ESTIMATOR else asked)
    known = sorted(set(ADV_ESTIMATOR_REGISTRY) - {ESTIMATOR})
    if base not in known:
        key = "algorithm.adv_estimator" if named is None else "verl_bridge.gca.base_estimator"
        raise ConfigError(f"{key}={base!r} is no advantage estimator of verl's: choose one of {', '.join(known)}")
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if settings.gca.enable and loss in UNFIT_LOSSES:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss} averages or branches on advantages again, which "
            "undoes GCA's residual: use vanilla or gspo, or verl_bridge.gca.enable=false"
        )
    if settings.gca.enable and settings.gca.salience != "uniform":
        _check_logits(config)
    if settings.gca.enable and settings.gca.yes_no == "drop":
        _drop_yes_no(config)
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


def _check_logits(config: DictConfig) -> None:
    """Raise ConfigError where the pass for old_log_probs shows no logits to our engine."""
    actor = config.actor_rollout_ref.actor
    reasons = (
        (
            config.actor_rollout_ref.model.get("use_fused_kernels", False),
            "actor_rollout_ref.model.use_fused_kernels=true makes no logits",
        ),
        (
            (config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False),
            "algorithm.rollout_correction.bypass_mode=true skips the pass for old_log_probs",
        ),
        (
            actor.strategy not in ("fsdp", "fsdp2"),
            f"actor_rollout_ref.actor.strategy={actor.strategy} has no hook for the logits (fsdp and fsdp2 have)",
        ),
    )
    for broken, reason in reasons:
        if broken:
            raise ConfigError(
                f"{reason}, which verl_bridge.gca.salience=margin_entropy reads: change that, or set "
                "verl_bridge.gca.salience=uniform"
            )


def _drop_yes_no(config: DictConfig) -> None:
    """Have verl read its datasets through ours, which leaves yes/no questions out of the training data."""
    with open_dict(config):
        custom = config.data.setdefault("custom_cls", {}) or {}
        if custom.get("path"):
            raise ConfigError(
                f"verl_bridge.gca.yes_no=drop with data.custom_cls.path={custom.get('path')!r}: the questions are left "
                "out by a dataset class of ours; leave them out of your own files or class, and set yes_no: gate"
            )
        config.data.custom_cls = {"path": "pkg://verl_bridge.integrations.verl.dataset", "name": "WithoutYesNo"}


def needs_files(settings: VerlBridgeConfig) -> bool:
    """Whether the job opens corpus and index itself: to serve them, or to learn."""
    return settings.bridge.enable or settings.retriever.url is None


def check_gold_answers(key: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError at the first row of a dataset without gold answers in Search-R1's column."""
    for number, row in enumerate(rows):
        try:
            gold_answers(row, f"{key}: row {number}")
        except ValueError as error:
            raise ConfigError(str(error)) from None


def read_probe(path: str | None) -> list[tuple[str, list[str]]]:
    """(query, golden answers) of each line of a JSONL file. Raises ConfigError that names the line."""
    if path is None:
        return []
    probe: list[tuple[str, list[str]]] = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                record = json.loads(line)
                if not isinstance(record, dict) or not isinstance(record.get("query"), str):
                    raise ValueError("it has no query")
                probe.append((record["query"], list(gold_answers(record, "it"))))
    except FileNotFoundError:
        raise ConfigError(f"verl_bridge.retriever.probe={path!r} does not exist: give a JSONL file, or null") from None
    except ValueError as error:  # bad JSON, bad UTF-8, no query, no gold answers
        raise ConfigError(
            f"verl_bridge.retriever.probe={path!r} line {len(probe) + 1}: {error}; "
            'write one {"query": …, "golden_answers": […]} a line'
        ) from None
    return probe
