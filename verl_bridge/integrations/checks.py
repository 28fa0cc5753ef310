"""Checks before a run starts that hold in every host. Every refusal names key, value and fix."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from verl_bridge.bilevel.schedule import retriever_objective
from verl_bridge.config import VerlBridgeConfig
from verl_bridge.config.schema import ConfigError
from verl_bridge.qa.questions import gold_answers

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


def trains_adapter(settings: VerlBridgeConfig) -> bool:
    """Whether the run has a retriever that learns in some step."""
    bridge = settings.bridge
    return bridge.enable and retriever_objective(bridge.schedule, bridge.estimator) is not None


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
