"""A trainer that writes down what its rollouts were: loaded by the tests through VERL_USE_EXTERNAL_MODULES.

One JSON line a step in ``$PROBE_FILE``: tokens, log-probs of rollout and actor, and what the loop left in
``extra_fields``, of every row.
"""

from __future__ import annotations

import json
import os
from types import ModuleType

from wrapt import register_post_import_hook


def _register(v1: ModuleType) -> None:
    import transfer_queue as tq

    from verl_bridge.integrations.verl.trainer import BridgeTrainerSync

    @v1.register_trainer("vllm_probe_sync")
    class ProbeTrainer(BridgeTrainerSync):
        def _compute_advantage(self, batch, metrics):
            batch = super()._compute_advantage(batch, metrics)
            real = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
            names = ["prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"]
            data = tq.kv_batch_get(keys=real, partition_id=batch.partition_id, select_fields=[*names, "extra_fields"])
            extra = data.pop("extra_fields").tolist()
            columns = {name: [row.tolist() for row in data[name].unbind()] for name in names}
            rows = [
                {**dict(zip(columns, values, strict=True)), "extra_fields": fields}
                for *values, fields in zip(*columns.values(), extra, strict=True)
            ]
            with open(os.environ["PROBE_FILE"], "a") as file:
                file.write(json.dumps({"step": self.global_steps, "rows": rows}, default=str) + "\n")
            return batch


register_post_import_hook(_register, "verl.trainer.ppo.v1")
