"""verl's FSDP engine, which also reads margin and entropy off the logits of the pass for ``old_log_probs``.

The trainer asks for it with flags in ``extra_info``; without them, as in the update, it does what verl's does. Imported
when verl has loaded its own engine (``plugin.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_bridge.integrations.verl.salience import ENTROPY, MARGIN, salience_outputs, wants_salience


class SalienceFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP language-model engine with the two columns, in both padding modes and under Ulysses."""

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Callable | None,
    ) -> dict[str, torch.Tensor]:
        model_output = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        if not wants_salience(micro_batch):
            return model_output
        logits = getattr(output, "logits", None)
        if logits is None:
            raise ValueError(
                "actor_rollout_ref.model.use_fused_kernels=true makes no logits to read salience from: "
                "set it to false, or verl_bridge.gca.salience=uniform"
            )
        logits = logits.detach()
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        offsets, labels = micro_batch["input_ids"].offsets(), output_args["input_ids_rmpad_rolled"]
        unscaled = output_args.get("temperature_is_one", False)  # verl scales nothing then
        if tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            temperature = None if unscaled else output_args["temperature_rmpad"]
            columns = salience_outputs(logits.squeeze(0), labels, micro_batch, temperature)
            # the shards of a sequence and what was padded to them, as verl treats its log_probs
            columns = {
                name: self._gather_and_unpad_packed(values, output_args["pad_size"]) for name, values in columns.items()
            }
        else:
            temperature = output_args["temperature"]
            rows = zip(logits, offsets.diff().tolist(), labels.split(offsets.diff().tolist()), temperature, strict=True)
            parts = [
                salience_outputs(row[:length], label, micro_batch, None if unscaled else scale.expand(length))
                for row, length, label, scale in rows
            ]
            columns = {name: torch.cat([part[name] for part in parts]) for name in (MARGIN, ENTROPY)}
        for name, values in columns.items():
            model_output[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
        return model_output
