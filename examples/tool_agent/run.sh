#!/usr/bin/env bash
# A function-calling model searches through verl's own tool_agent loop; retriever and credit learn as with tags.
set -euo pipefail
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  +verl_bridge=bridge_gca \
  actor_rollout_ref.rollout.agent.default_agent_loop=verl_bridge_tool_agent \
  actor_rollout_ref.rollout.multi_turn.{format=hermes,max_parallel_calls=4} \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-3B-Instruct}" \
  actor_rollout_ref.model.use_remove_padding=true \
  data.train_files="${TRAIN:?a parquet file: examples/tool_agent/README.md}" data.val_files="${VAL:?a parquet file}" \
  data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=4096 \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.rollout.{name=vllm,n=8,log_prob_use_dynamic_bsz=true} \
  verl_bridge.retriever.{corpus="${CORPUS:?the JSONL of the documents}",index="${INDEX:?the folder of the index}"} \
  "$@"
