"""Checks before a run starts that hold in every host. Every refusal names key, value and fix."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from omegaconf import DictConfig

from verl_bridge.bilevel.schedule import retriever_objective
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.config.schema import GCA_ESTIMATOR, ConfigError
from verl_bridge.qa.questions import gold_answers, training_golds

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


def stop_unless(check: Callable[[DictConfig], Any], config: DictConfig) -> None:
    """For Hydra's ``on_job_start``: one line on stderr and exit code 2 when ``check`` raises.

    Hydra turns any exception of a callback into a warning, and a run that fails its checks must not go on.
    """
    try:
        check(config)
    except Exception as error:
        print(f"verl_bridge: {error if isinstance(error, (ValueError, OSError)) else repr(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def named_estimator(config: DictConfig, settings: VerlBridgeConfig, known: Collection[str]) -> str:
    """verl's name of the estimator that GCA builds on, as the config gives it; ``known`` are those that verl has.

    Raises:
        ConfigError: ``gca.base_estimator`` without GCA, or an estimator that is not known.
    """
    asked, named = str(config.algorithm.adv_estimator), settings.gca.base_estimator
    if named is not None and not settings.gca.enable:
        raise ConfigError(
            f"verl_bridge.gca.base_estimator={named!r} with verl_bridge.gca.enable=false would change the recipe's "
            "own estimator: set algorithm.adv_estimator instead"
        )
    base = named or ("grpo" if asked == GCA_ESTIMATOR else asked)
    if base not in known:
        key = "algorithm.adv_estimator" if named is None else "verl_bridge.gca.base_estimator"
        raise ConfigError(
            f"{key}={base!r} is not an advantage estimator of verl's: choose one of {', '.join(sorted(known))}"
        )
    return base


def check_policy_loss(config: DictConfig, settings: VerlBridgeConfig) -> None:
    """Raise ConfigError for a policy loss that undoes GCA."""
    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if settings.gca.enable and loss in UNFIT_LOSSES:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss} averages or branches on advantages again, which "
            "undoes GCA's residual: use vanilla or gspo, or verl_bridge.gca.enable=false"
        )


def trains_adapter(settings: VerlBridgeConfig) -> bool:
    """Whether the run has a retriever that learns in some step."""
    bridge = settings.bridge
    return bridge.enable and retriever_objective(bridge.schedule, bridge.estimator) is not None


def check_gold_answers(key: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError at the first row of a dataset without gold answers in Search-R1's column.

    Rows count from 1, as ``data check`` counts them.
    """
    for number, row in enumerate(rows, 1):
        try:
            training_golds(row, f"{key}: row {number}")
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
