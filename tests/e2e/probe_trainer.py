"""A trainer that looks at itself: loaded by the end-to-end tests through VERL_USE_EXTERNAL_MODULES.

Each step it writes what verl's own estimator gives on the same rollouts, what our trainer left in TransferQueue, and
the slow reference of GCA, all as differences, to ``$PROBE_FILE``.
"""

from __future__ import annotations

import json
import os
from types import ModuleType

from wrapt import register_post_import_hook

FIXED = ([5, 6, 7, 8, 9], [10, 11, 12])  # scored before and after a step: has the policy moved?


def _register(v1: ModuleType) -> None:
    import numpy as np
    import torch
    import transfer_queue as tq
    from ray.util import list_named_actors
    from verl.trainer.ppo import core_algos

    from tests.e2e.reference import reference_advantages
    from verl_bridge.integrations.checks import GROUP_RELATIVE
    from verl_bridge.integrations.verl.rollouts import read_rollouts
    from verl_bridge.integrations.verl.salience import ENTROPY, MARGIN
    from verl_bridge.integrations.verl.scoring import answer_log_probs
    from verl_bridge.integrations.verl.trainer import BridgeTrainerSync

    @v1.register_trainer("probe_sync")
    class ProbeTrainer(BridgeTrainerSync):
        def _ground(self, batch, rollouts, signals):
            self._base = rollouts.advantages.clone()
            return super()._ground(batch, rollouts, signals)

        def _compute_advantage(self, batch, metrics):
            batch = super()._compute_advantage(batch, metrics)
            rollouts = read_rollouts(batch, [MARGIN, ENTROPY] if self._weighs_tokens else [])
            fields = ["rm_scores", "responses"]
            data = tq.kv_batch_get(keys=rollouts.keys, partition_id=batch.partition_id, select_fields=fields)
            rewards = torch.nested.to_padded_tensor(data["rm_scores"], 0.0)
            plain, _ = core_algos.compute_grpo_outcome_advantage(
                token_level_rewards=rewards,
                response_mask=rollouts.response_mask,
                index=np.array(rollouts.uids, dtype=object),
            )
            base = plain if self.base_estimator == "grpo" else self._base
            reference = reference_advantages(
                rollouts.traces,
                base,
                rollouts.response_mask,
                rollouts.uids,
                rollouts.rewards,
                self.base_estimator in GROUP_RELATIVE,
                margin=rollouts.columns.get(MARGIN),
                top_entropy=rollouts.columns.get(ENTROPY),
            )
            texts = [
                self.tokenizer.decode(self.tokenizer.encode(trace.question)) == trace.question
                for trace in rollouts.traces
            ]
            record = {
                "rows": len(rollouts.keys),
                "plain_differs": int((rollouts.advantages != plain).sum()),
                "reference_differs": float((rollouts.advantages - reference).abs().max()),
                "grounding_moves": float((reference - base).abs().max()),
                "plain_largest": float(plain.abs().max()),
                "signs_in_one_rollout": int(((base > 0).any(-1) & (base < 0).any(-1)).sum()),
                "versions": sorted(
                    {t.adapter_version for r in rollouts.traces for t in r.searches if t.status == "ok"}
                ),
                "now_version": self._adapter_version(),
                "questions_encode": all(texts),
                "likelihood": self._likelihoods((rollouts.prompt_ids[0], [5, 6, 7]), (rollouts.prompt_ids[0], [8])),
                "policy_before": self._likelihoods(FIXED),
                "prompt_ids": rollouts.prompt_ids[0],
                "response_ids": data["responses"].unbind()[0].tolist(),
                "response_mask": rollouts.response_mask[0].tolist(),
                "columns": {name: rollouts.columns[name][0].tolist() for name in rollouts.columns},
                "mask_is_spans": rollouts.response_mask.sum(-1).tolist()
                == [sum(t.span[1] - t.span[0] for t in trace.turns) for trace in rollouts.traces],
                "spans_fit": all(
                    rollouts.response_mask[i, t.span[0] : t.span[1]].all()
                    and (t.observation_span is None or not rollouts.response_mask[i, slice(*t.observation_span)].any())
                    for i, trace in enumerate(rollouts.traces)
                    for t in trace.turns
                ),
            }
            self._expected = rollouts.advantages
            self._write(**record)
            return batch

        def _update_actor(self, batch, metrics):
            received = read_rollouts(batch).advantages
            batch = super()._update_actor(batch, metrics)
            self._write(
                actor_receives_it=torch.equal(received, self._expected),
                advantages_stay=torch.equal(read_rollouts(batch).advantages, received),
                keys_left=sorted(set(tq.kv_list("train")["train"]) - set(batch.keys) - self._prompts()),
            )
            return batch

        def _step_once(self, *args):
            batch = super()._step_once(*args)
            self._write(
                policy_after=self._likelihoods(FIXED),
                version_after=self._adapter_version(),
                served_after=self.retrieval.search(["where"], 1)[0]["adapter_version"],
                actors=self._retriever_actors(),
            )
            return batch

        def _retriever_actors(self):
            name = self.settings.retriever.actor_name
            return sorted(a for a in list_named_actors() if a.startswith(name) and not a.endswith("_keeper"))

        def _prompts(self):
            return {key for key, tag in tq.kv_list("train")["train"].items() if tag.get("is_prompt")}

        def _adapter_version(self):
            return max(self.retrieval.known_versions()) if self._trains_adapter else None

        def _likelihoods(self, *sequences):
            scored = answer_log_probs(self.actor_rollout_wg, sequences, temperature=1.0, max_token_len_per_gpu=4096)
            return [float(row.sum()) for row in scored]

        def _write(self, **record):
            with open(os.environ["PROBE_FILE"], "a") as file:
                file.write(json.dumps({"step": self.global_steps, **record}) + "\n")


register_post_import_hook(_register, "verl.trainer.ppo.v1")
