"""What every host's trainer hands to the methods: one training batch, unpacked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from verl_bridge.algorithms.grounding import RolloutType
from verl_bridge.files import new_file
from verl_bridge.trace import SearchTrace


@dataclass(frozen=True)
class RolloutBatch:
    """The real rows of one training batch (``batch`` of them), right-padded to the longest response.

    Args:
        keys: what the host finds the rows by (TransferQueue's keys; none where it keeps one padded batch).
        uids: the prompt group of each row.
        traces: the record of each row.
        prompt_ids, response_ids: the tokens of each row.
        response_mask: 1 on sampled tokens, ``(batch, response)``.
        advantages: what the base estimator gave, ``(batch, response)``.
        rewards: outcome reward, ``(batch,)``.
        group_index: the uid of each row as an integer, ``(batch,)``.
        columns: what else was asked for and is there, by name, ``(batch, response)`` each.
    """

    keys: list[str]
    uids: list[str]
    traces: list[SearchTrace]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    response_mask: torch.Tensor
    advantages: torch.Tensor
    rewards: torch.Tensor
    group_index: torch.Tensor
    columns: dict[str, torch.Tensor]


def save_rollouts(file: Path, rollouts: RolloutBatch, types: torch.Tensor, *, step: int) -> None:
    """One JSON line per rollout, as ``verl-bridge eval --rollouts`` reads them.

    Args:
        file: appears when complete.
        rollouts: the batch.
        types: codes of :class:`~verl_bridge.algorithms.grounding.RolloutType`, ``(batch,)``.
        step: verl's global step.
    """
    rows = zip(rollouts.uids, rollouts.rewards.tolist(), types.tolist(), rollouts.traces, strict=True)
    with new_file(file) as out:
        for uid, reward, code, trace in rows:
            row = {"step": step, "uid": uid, "reward": reward, "type": RolloutType(code).name, "trace": trace.to_dict()}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
