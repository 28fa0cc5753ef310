"""The rows of :mod:`~verl_bridge.integrations.verl.correction` in TransferQueue, for the time of one policy update."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import (
    SYNTHETIC_PADDING_SEQ_LEN,
    build_padding_position_ids,
    build_padding_routed_experts,
)
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_bridge.integrations.retriever_step import Correction, Scored
from verl_bridge.integrations.verl.correction import place, weigh
from verl_bridge.integrations.verl.scoring import jagged


@contextmanager
def correction_rows(
    batch: KVBatchMeta,
    correction: Correction,
    *,
    loss_agg_mode: str,
    mini_batch_rows: int,
    ranks: int,
    multiple: int,
    pad_token: int,
) -> Iterator[tuple[KVBatchMeta, int]]:
    """Within it the batch with the correction's rows, in TransferQueue too; afterwards all is as it was.

    Args:
        batch: verl's training batch, in the order in which ranks and mini-batches cut it.
        correction: what to add.
        loss_agg_mode: the actor's.
        mini_batch_rows: policy rows of a mini-batch over all ranks; divides the batch.
        ranks: data-parallel size.
        multiple: what the rows added to a mini-batch must be a multiple of; ``ranks`` divides it.
        pad_token: fills rows that are there only for the size.

    Yields:
        the larger batch and the rows of its mini-batches.
    """
    stored = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages", "loss_mask"]
    )
    before, tokens = stored["advantages"].unbind(), [int(row.sum()) for row in stored["loss_mask"].unbind()]
    source = tq.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id, select_fields=batch.fields)[0]
    made = _make_rows(
        batch.keys,
        tokens,
        correction,
        source,
        loss_agg_mode=loss_agg_mode,
        mini_batch_rows=mini_batch_rows,
        ranks=ranks,
        multiple=multiple,
        pad_token=pad_token,
    )
    tags = dict(zip(batch.keys, batch.tags, strict=True))
    tags |= {name: _tag(batch.tags[0], row) for name, row in zip(made.keys, made.rows, strict=True)}
    fields = list_of_dict_to_tensordict(made.rows)
    partition = batch.partition_id
    try:
        tq.kv_batch_put(keys=made.keys, partition_id=partition, fields=fields, tags=[tags[key] for key in made.keys])
        _put_advantages(batch, [row * factor for row, factor in zip(before, made.factors, strict=True)])
        larger = KVBatchMeta(
            partition_id=partition,
            keys=made.order,
            tags=[tags[key] for key in made.order],
            fields=batch.fields,
            extra_info=batch.extra_info,
        )
        yield larger, mini_batch_rows + made.per_mini_batch
    finally:
        _put_advantages(batch, before)
        tq.kv_clear(keys=made.keys, partition_id=partition)


@dataclass(frozen=True)
class _MadeRows:
    """The new rows and where they go.

    Args:
        keys, rows: of the new rows.
        order: the keys of old and new rows, in the order in which ranks and mini-batches cut them.
        factors: for the advantages of the old rows, in their order.
        per_mini_batch: new rows in each mini-batch.
    """

    keys: list[str]
    rows: list[dict[str, Any]]
    order: list[str]
    factors: list[float]
    per_mini_batch: int


def _make_rows(
    batch_keys: Sequence[str],
    tokens: Sequence[int],
    correction: Correction,
    source: TensorDict,
    *,
    loss_agg_mode: str,
    mini_batch_rows: int,
    ranks: int,
    multiple: int,
    pad_token: int,
) -> _MadeRows:
    """The correction's rows, dealt to the mini-batches; ``tokens`` of each old row are in the loss.

    ``source`` is a row whose columns the new ones take; the other arguments are those of :func:`correction_rows`.
    """
    mini_batches = len(batch_keys) // mini_batch_rows
    parts, count = place(len(correction.sequences), mini_batches, multiple)
    run = f"correction{uuid.uuid4().hex}"
    per_rank, share = len(batch_keys) // ranks, mini_batch_rows // ranks
    order: list[list[str]] = [[] for _ in range(ranks)]
    keys, rows, factors = [], [], [1.0] * len(batch_keys)
    for number, part in enumerate(parts):
        # verl gives every rank an equal run of rows, and cuts each rank's run into its mini-batches
        starts = [rank * per_rank + number * share for rank in range(ranks)]
        own = [range(start, start + share) for start in starts]
        advantages, factor = weigh(
            [correction.coefficients[i] for i in part],
            [len(correction.sequences[i][1]) for i in part],
            mini_batches=mini_batches,
            loss_agg_mode=loss_agg_mode,
            policy_rows=mini_batch_rows,
            policy_tokens=sum(tokens[i] for indices in own for i in indices),
            rows=count,
        )
        new = [f"{run}_{len(rows) + i}_0" for i in range(count)]
        keys += new
        rows += [
            _row(source, correction.sequences[i], correction.log_probs[i], advantage)
            for i, advantage in zip(part, advantages, strict=True)
        ]
        rows += [_padding(source, pad_token) for _ in range(count - len(part))]
        for rank, indices in enumerate(own):
            # dealt out in turn: padding, which comes last, is spread over the ranks
            order[rank] += [*(batch_keys[i] for i in indices), *new[rank::ranks]]
            for i in indices:
                factors[i] = factor
    return _MadeRows(keys, rows, [key for of_rank in order for key in of_rank], factors, count)


def _put_advantages(batch: KVBatchMeta, rows: Sequence[Tensor]) -> None:
    fields = TensorDict({"advantages": jagged(rows)}, batch_size=len(rows))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def _padding(source: TensorDict, token: int) -> dict[str, Any]:
    """A row of the size that verl's own padding rows have, without a token in the loss."""
    context, answer = [token] * (SYNTHETIC_PADDING_SEQ_LEN - 1), [token]
    return _row(source, (context, answer), torch.zeros(1), 0.0, masked=True)


def _row(
    source: TensorDict, sequence: Scored, log_probs: Tensor, advantage: float, masked: bool = False
) -> dict[str, Any]:
    """A row with the columns of ``source``: the answer as response, zeros in columns that the update does not read."""
    prompts, responses = (torch.tensor(ids, dtype=source["responses"].dtype) for ids in sequence)
    ids = torch.cat((prompts, responses))
    ones = torch.ones_like(ids)
    mask = torch.zeros_like(responses) if masked else torch.ones_like(responses)
    said, seen = len(source["responses"]), len(source["input_ids"])
    row = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": build_padding_position_ids(source["position_ids"], ones),
        "response_mask": mask.to(source["response_mask"].dtype),
        "loss_mask": mask.to(source["loss_mask"].dtype),
        "old_log_probs": log_probs.to(source["old_log_probs"].dtype),
        "advantages": torch.full_like(source["advantages"][:1], advantage).expand(len(responses)).clone(),
        "rollout_is_weights": torch.ones(len(responses)),
        "routed_experts": build_padding_routed_experts(source.get("routed_experts", None), len(ids)),
        "multi_modal_inputs": {},
    }
    row = {name: value for name, value in row.items() if name in source.keys()}
    for name in source.keys():
        value = source[name]
        if name in row:
            continue
        if isinstance(value, Tensor) and value.dim() and len(value) in (said, seen):
            row[name] = value.new_zeros(len(ids) if len(value) == seen else len(responses), *value.shape[1:])
        else:
            row[name] = {} if isinstance(value, dict) else value  # a trace is large, and nobody reads it here
    return row


def _tag(source: dict, row: dict[str, Any]) -> dict[str, Any]:
    prompt, response = len(row["prompts"]), len(row["responses"])
    sizes = {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
    return {**source, **sizes, "is_padding": True}  # no rollout: nothing is to be counted by it
