"""Salience from the pass verl makes for ``old_log_probs``: how the trainer asks for it, and what the engine answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from verl_bridge.algorithms.salience import token_statistics

MARGIN, ENTROPY = "salience_margin", "salience_entropy"  # columns over the whole sequence, as verl's log_probs
_FLAGS = ("salience_margin_k", "salience_entropy_m")
_CHUNK = 2**25  # bytes of logits that are scaled at a time


@contextmanager
def asking_for_salience(batch: KVBatchMeta, *, margin_k: int, entropy_m: int) -> Iterator[None]:
    """Within it, ``compute_log_prob`` on ``batch`` writes the columns :data:`MARGIN` and :data:`ENTROPY` too."""
    batch.extra_info.update(zip(_FLAGS, (margin_k, entropy_m), strict=True))
    try:
        yield
    finally:
        for flag in _FLAGS:
            batch.extra_info.pop(flag, None)


def wants_salience(micro_batch: Any) -> bool:
    """Whether the trainer asked for the columns."""
    return tu.get_non_tensor_data(data=micro_batch, key=_FLAGS[0], default=None) is not None


@torch.no_grad()
def salience_outputs(
    logits: Tensor, labels: Tensor, micro_batch: Any, temperature: Tensor | None = None
) -> dict[str, Tensor]:
    """The two columns for packed tokens, ``(tokens,)`` float32 each.

    Args:
        logits: ``(tokens, vocabulary)``, without gradient.
        labels: the tokens that followed, ``(tokens,)``.
        micro_batch: carries K and M.
        temperature: to scale by, ``(tokens,)``, a chunk at a time; None when the logits are scaled.
    """
    margin_k, entropy_m = (tu.get_non_tensor_data(data=micro_batch, key=flag, default=None) for flag in _FLAGS)
    rows = max(1, _CHUNK // (logits.shape[-1] * logits.element_size()))
    size = len(logits) if temperature is None else rows
    parts = []
    for start in range(0, len(logits), max(size, 1)):
        chunk = logits[start : start + size]
        if temperature is not None:
            scale = temperature[start : start + size, None].clamp(min=1e-8)
            chunk = chunk / scale.to(chunk.dtype)  # as verl scales them for log_probs
        parts.append(token_statistics(chunk, labels[start : start + size], margin_k=margin_k, entropy_m=entropy_m))
    columns = {MARGIN: [part.margin for part in parts], ENTROPY: [part.entropy for part in parts]}
    return {name: torch.cat(column) if column else logits.new_empty(0) for name, column in columns.items()}
