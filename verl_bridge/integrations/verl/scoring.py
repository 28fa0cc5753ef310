"""Answer log-likelihoods from the actor workers: verl's own ``compute_log_prob`` on sequences of ours.

The sequences of a prompt share it, but verl 0.9.1 computes it anew for each. Its shared-prefix forward
(``actor_rollout_ref.actor.use_prefix_grouper``) does not reach this pass: the key is read by the old trainers only
(``trainer/ppo/ray_trainer.py``, ``experimental/{fully_async_policy,one_step_off_policy}``), to order their batches; the
engine behind the V1 trainer calls ``apply_monkey_patch`` without it (``workers/engine/fsdp/transformer_impl.py``),
nothing calls ``forward_micro_batch_with_prefix_grouper``, and the package ``prefix_grouper`` it would need is not a
dependency of verl's. What is saved is saved by the plan: each sequence is scored once.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict

PARTITION = "verl_bridge_likelihood"


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of different length as the nested tensor TransferQueue keeps."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def data_parallel_size(worker_group: Any) -> int:
    """Ranks over which the actor workers split a batch."""
    if "actor" not in worker_group._dispatch_info:
        worker_group._dispatch_info["actor"] = worker_group._query_dispatch_info("actor")
    return max(worker_group._dispatch_info["actor"]) + 1


def answer_log_probs(
    worker_group: Any,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    temperature: float,
    max_token_len_per_gpu: int,
) -> list[torch.Tensor]:
    """log π of the answer's tokens of each ``(context_ids, answer_ids)`` under the actor's current weights.

    The pass is the one verl makes for ``old_log_probs``: same engine, same sharding, dynamic batches of at most
    ``max_token_len_per_gpu`` tokens. Returns nats, ``(answer,)`` each, in the order of ``sequences``.
    """
    if not sequences:
        return []
    ranks = data_parallel_size(worker_group)
    # verl splits the rows evenly over the data-parallel ranks and waits for ever when a rank gets none.
    padded = [sequences[i % len(sequences)] for i in range(-(-len(sequences) // ranks) * ranks)]
    rows = [torch.tensor([*context, *answer]) for context, answer in padded]
    masks = [torch.tensor([0] * len(context) + [1] * len(answer)) for context, answer in padded]
    run = uuid.uuid4().hex
    keys = [f"{run}_{i}_0" for i in range(len(rows))]
    fields = TensorDict(
        {
            "input_ids": jagged(rows),
            "position_ids": jagged([torch.arange(len(row)) for row in rows]),
            "loss_mask": jagged(masks),
        },
        batch_size=len(rows),
    )
    meta = tq.kv_batch_put(
        keys=keys, partition_id=PARTITION, fields=fields, tags=[{"seq_len": len(row)} for row in rows]
    )
    try:
        meta.extra_info.update(
            calculate_entropy=False,
            compute_loss=False,
            temperature=temperature,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=max_token_len_per_gpu,
        )
        worker_group.compute_log_prob(meta)
        wanted = keys[: len(sequences)]
        log_probs = tq.kv_batch_get(keys=wanted, partition_id=PARTITION, select_fields=["log_probs"])["log_probs"]
    finally:
        tq.kv_clear(keys=keys, partition_id=PARTITION)
    return [
        row[len(context) - 1 : len(context) - 1 + len(answer)].clone()
        for row, (context, answer) in zip(log_probs.unbind(), sequences, strict=True)
    ]
