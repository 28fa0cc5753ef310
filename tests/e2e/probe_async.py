"""The asynchronous trainers looking at themselves, through VERL_USE_EXTERNAL_MODULES: one line a local update."""

from __future__ import annotations

import json
import os
from types import ModuleType

from wrapt import register_post_import_hook


def _register(v1: ModuleType) -> None:
    import numpy as np
    import torch
    import transfer_queue as tq
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1 import PPOTrainer

    from tests.e2e.reference import reference_advantages
    from verl_bridge.integrations.verl.async_trainers import BridgeTrainerColocateAsync, BridgeTrainerSeparateAsync
    from verl_bridge.integrations.verl.rollouts import read_rollouts
    from verl_bridge.integrations.verl.salience import ENTROPY, MARGIN

    def fetch(batch, *fields):
        return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))

    class Probe:
        def on_train_begin(self):
            self._restored = self._restored_tq_prompt_count
            return super().on_train_begin()

        def _compute_old_log_prob(self, batch, metrics):
            # verl's base class, whose policy is the one of this moment; the trainer's own writes over it.
            PPOTrainer._compute_old_log_prob(self, batch, {})
            present = fetch(batch, "old_log_probs")["old_log_probs"].unbind()
            batch = super()._compute_old_log_prob(batch, metrics)
            data = fetch(batch, "old_log_probs", "rollout_log_probs", "response_mask")
            columns = (data[name].unbind() for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
            rows = []
            for tag, now, old, rollout, mask in zip(batch.tags, present, *columns, strict=True):
                sampled = mask.bool()
                rows.append(
                    {
                        "weights": [tag["min_global_steps"], tag["max_global_steps"]],
                        "old_and_rollout": float((old.exp() - rollout.exp())[sampled].abs().max()),
                        "old_and_present": float((old - now)[sampled].abs().max()),
                    }
                )
            self._record = {
                "step": self.global_steps,
                "local_step": self.local_trigger_step,
                "restored_prompts": self._restored,
                "newest": max(self.retrieval.known_versions()),
                "rows": rows,
            }
            return batch

        def _update_actor(self, batch, metrics):
            """What the actor is about to receive, against verl's estimator and the slow reference on these rollouts."""
            rollouts = read_rollouts(batch, [MARGIN, ENTROPY])
            plain, _ = core_algos.compute_grpo_outcome_advantage(
                token_level_rewards=torch.nested.to_padded_tensor(fetch(batch, "rm_scores")["rm_scores"], 0.0),
                response_mask=rollouts.response_mask,
                index=np.array(rollouts.uids, dtype=object),
            )
            reference = reference_advantages(
                rollouts.traces,
                plain,
                rollouts.response_mask,
                rollouts.uids,
                rollouts.rewards,
                margin=rollouts.columns[MARGIN],
                top_entropy=rollouts.columns[ENTROPY],
            )
            self._record |= {
                "reference_differs": float((rollouts.advantages - reference).abs().max()),
                "grounding_moves": float((reference - plain).abs().max()),
                "served_by": [[t.adapter_version for t in r.searches if t.status == "ok"] for r in rollouts.traces],
                "adapter_now": max(self.retrieval.known_versions()),
                "spans_fit": all(
                    rollouts.response_mask[i, slice(*t.span)].all()
                    and (t.observation_span is None or not rollouts.response_mask[i, slice(*t.observation_span)].any())
                    for i, trace in enumerate(rollouts.traces)
                    for t in trace.turns
                ),
                "sampled_tokens_are_in_turns": bool(
                    (rollouts.response_mask.sum(-1)).tolist()
                    == [sum(t.span[1] - t.span[0] for t in trace.turns) for trace in rollouts.traces]
                ),
            }
            with open(os.environ["PROBE_FILE"], "a") as file:
                file.write(json.dumps(self._record) + "\n")
            return super()._update_actor(batch, metrics)

    @v1.register_trainer("probe_colocate_async")
    class ProbeColocateAsync(Probe, BridgeTrainerColocateAsync):
        pass

    @v1.register_trainer("probe_separate_async")
    class ProbeSeparateAsync(Probe, BridgeTrainerSeparateAsync):
        pass


register_post_import_hook(_register, "verl.trainer.ppo.v1")
