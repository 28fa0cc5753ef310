"""A trainer's batch as the methods want it: traces and padded tensors, verl's padding rows left out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from verl_bridge.algorithms.grounding import index_groups
from verl_bridge.integrations.rollout_batch import RolloutBatch
from verl_bridge.integrations.verl.scoring import jagged
from verl_bridge.plugin import AGENT_LOOP, TOOL_AGENT_LOOP
from verl_bridge.trace import SearchTrace


def read_rollouts(batch: KVBatchMeta, columns: Sequence[str] = ()) -> RolloutBatch:
    """Fetch what the methods need from TransferQueue.

    Args:
        batch: the step's batch.
        columns: further per-token columns, over the response or, as an engine writes them, over the whole sequence;
            those that nobody wrote (an engine without the hook) are left out.

    Raises:
        ValueError: a row carries no trace.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = ["uid", "extra_fields", "prompts", "responses", "response_mask", "advantages", "rm_scores", *columns]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
    traces = []
    for extra in data.pop("extra_fields").tolist():
        record = extra.get("search_trace")
        if record is None:
            raise ValueError(
                "a rollout carries no extra_fields['search_trace']: its agent loop is not ours; "
                f"set actor_rollout_ref.rollout.agent.default_agent_loop to {AGENT_LOOP}, or to {TOOL_AGENT_LOOP} for "
                "a function-calling model, and leave agent_name out of the dataset"
            )
        traces.append(SearchTrace.from_dict(record))
    uids = [str(uid) for uid in data.pop("uid").tolist()]
    mask = torch.nested.to_padded_tensor(data["response_mask"], 0)
    read = {name: data[name] for name in columns if name in data.keys()}
    for name, values in read.items():
        if values.offsets()[-1] != data["response_mask"].offsets()[-1]:
            values = response_from_nested(values, data["response_mask"])
        read[name] = torch.nested.to_padded_tensor(values, 0.0)
    return RolloutBatch(
        keys=keys,
        uids=uids,
        traces=traces,
        prompt_ids=[row.tolist() for row in data["prompts"].unbind()],
        response_ids=[row.tolist() for row in data["responses"].unbind()],
        response_mask=mask,
        advantages=torch.nested.to_padded_tensor(data["advantages"], 0.0),
        rewards=torch.nested.to_padded_tensor(data["rm_scores"], 0.0).sum(-1),
        group_index=index_groups(uids),
        columns=read,
    )


def write_advantages(batch: KVBatchMeta, rollouts: RolloutBatch, advantages: torch.Tensor) -> None:
    """Replace the advantages of the real rows; padding rows keep theirs."""
    lengths = [trace.response_length for trace in rollouts.traces]
    rows = [row[:length].contiguous() for row, length in zip(advantages, lengths, strict=True)]
    tq.kv_batch_put(
        keys=rollouts.keys,
        partition_id=batch.partition_id,
        fields=TensorDict({"advantages": jagged(rows)}, batch_size=len(rows)),
    )
