"""The query encoder as it serves: the adapter merged into a copy of the weights, in a number format of its own."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_bridge.retrieval.encoder import QueryEncoder
from verl_bridge.retrieval.precision import resolve_dtype

if TYPE_CHECKING:
    import torch


class ServingEncoder:
    """Serves what a :class:`QueryEncoder` has learnt, two to three times as fast.

    A LoRA layer costs four small operations where a merged one costs one, and bfloat16 weights halve the rest. The
    copy follows the encoder: it notices every change of the adapter's tensors before the next call, so that no stale
    vector is served. float32 agrees with the encoder to rounding, bfloat16 to a cosine of about 0.9999.

    Args:
        queries: owns adapter and version.
        compute_dtype: ``float32``, ``bfloat16``, ``float16`` (GPU) or ``auto``; see ``precision.resolve_dtype``.
    """

    def __init__(self, queries: QueryEncoder, compute_dtype: str = "auto") -> None:
        import torch

        base = queries.base
        self.queries, self.dim = queries, queries.dim
        self.compute_dtype = resolve_dtype(compute_dtype, base.model.device.type)
        self._lora = _lora_layers(base.model)
        self._parameters = list(queries.lora_parameters().values())
        # the copy shares nothing with the model that learns, and has plain layers where that one has LoRA
        self._model = copy.deepcopy(base.model)
        for name in self._lora:
            parent, _, child = name.rpartition(".")
            setattr(self._model.get_submodule(parent), child, self._model.get_submodule(name).base_layer)
        self._model.requires_grad_(False).to(getattr(torch, self.compute_dtype))
        self._merged: Any = None
        self._merge()

    @property
    def adapter_version(self) -> int:
        """The version of the adapter that serves."""
        return self.queries.adapter_version

    def _state(self) -> tuple[int, ...]:
        # torch counts the in-place changes of every tensor
        return self.adapter_version, *(parameter._version for parameter in self._parameters)

    def _merge(self) -> None:
        import torch

        with torch.no_grad():
            for name, layer in self._lora.items():
                # summed in float32, then rounded once
                merged = layer.base_layer.weight + layer.get_delta_weight("default")
                self._model.get_submodule(name).weight.copy_(merged)
        self._merged = self._state()

    def encode_queries(self, queries: Sequence[str]) -> torch.Tensor:
        """Float32 vectors of queries with the current adapter, shape (queries, dim), without gradient."""
        import torch

        if self._merged != self._state():
            self._merge()
        with torch.inference_mode():
            return self.queries.base.encode([self.queries.query_prefix + query for query in queries], self._model)

    def load_adapter(self, source: str | os.PathLike | bytes, version: int) -> None:
        """See :meth:`QueryEncoder.load_adapter`; merged at once, so that the next query does not wait for it.

        Raises:
            ValueError: also when queries overflow with it; the one before serves on.
        """
        import torch

        before, known = self.queries.adapter_state(), self.adapter_version
        self.queries.load_adapter(source, version)
        if not torch.isfinite(self.encode_queries(["a query to try it with"])).all():
            self.queries.set_adapter_state(before, known)
            raise ValueError("the adapter makes query vectors that are not finite; use the one before it")

    def save_adapter(self, directory: str | os.PathLike) -> None:
        """See :meth:`QueryEncoder.save_adapter`."""
        self.queries.save_adapter(directory)

    def describe(self) -> dict[str, Any]:
        """See :meth:`QueryEncoder.describe`."""
        return self.queries.describe()


def _lora_layers(model: Any) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
