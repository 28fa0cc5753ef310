"""verl-tool's padded batch: unpacked for the methods, and answers scored by its actor workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl import DataProto
from verl.protocol import pad_dataproto_to_divisor

from verl_bridge.algorithms.grounding import index_groups
from verl_bridge.integrations.rollout_batch import RolloutBatch
from verl_bridge.integrations.verl_tool import AGENT_LOOP
from verl_bridge.trace import SearchTrace


def read_rollouts(batch: DataProto) -> RolloutBatch:
    """The rows of a training batch with their base advantages. Raises ValueError when a row carries no trace."""
    tensors, columns = batch.batch, batch.non_tensor_batch
    records = columns.get("search_trace")
    if records is None or any(record is None for record in records):
        raise ValueError(
            "a rollout carries no search_trace: its agent loop is not ours; set "
            f"actor_rollout_ref.rollout.agent.default_agent_loop={AGENT_LOOP} and leave agent_name out of the dataset"
        )
    width = tensors["prompts"].shape[-1]
    attended = tensors["attention_mask"].bool()
    prompts = [row[seen].tolist() for row, seen in zip(tensors["prompts"], attended[:, :width], strict=True)]
    responses = [row[seen].tolist() for row, seen in zip(tensors["responses"], attended[:, width:], strict=True)]
    uids = [str(uid) for uid in columns["uid"]]
    return RolloutBatch(
        keys=[],
        uids=uids,
        traces=[SearchTrace.from_dict(record) for record in records],
        prompt_ids=prompts,
        response_ids=responses,
        response_mask=tensors["response_mask"],
        advantages=tensors["advantages"],
        rewards=tensors["token_level_scores"].sum(-1),
        group_index=index_groups(uids),
        columns={},
    )


def answer_log_probs(
    worker_group: Any, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, pad_token: int
) -> list[torch.Tensor]:
    """log π of the answer's tokens of each ``(context_ids, answer_ids)`` under the actor's current weights.

    The pass is the one verl-tool makes for ``old_log_probs``, with the micro-batches and the temperature of its own
    settings. Returns nats, ``(answer,)`` each, in the order of ``sequences``.
    """
    if not sequences:
        return []
    left = max(len(context) for context, _ in sequences)
    right = max(len(answer) for _, answer in sequences)
    ids = torch.full((len(sequences), left + right), pad_token)
    mask = torch.zeros_like(ids)
    for row, (context, answer) in enumerate(sequences):  # contexts end and answers begin at `left`
        columns = slice(left - len(context), left + len(answer))
        ids[row, columns] = torch.tensor([*context, *answer])
        mask[row, columns] = 1
    data = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, left:],
        }
    )
    padded, _ = pad_dataproto_to_divisor(data, worker_group.world_size)
    log_probs = worker_group.compute_log_prob(padded).batch["old_log_probs"]
    return [log_probs[row, : len(answer)].clone() for row, (_, answer) in enumerate(sequences)]
