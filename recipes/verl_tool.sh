#!/usr/bin/env bash
# Usage: verl_tool.sh ARM [verl-tool's own arguments]   ARM: bridge, or baseline (VT-Search); gca and bridge_gca work too.
# BRIDGE's published setting on verl-tool, which its paper used. Two servers must run (README.md, "On verl-tool"):
# RETRIEVER_URL (verl-bridge serve) and TOOL_URL (verl_bridge.integrations.verl_tool.serve).
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
arm="${1:?which arm? bridge, or baseline for VT-Search}"
data="${DATA_DIR:-data/nq_hotpotqa_train}"
exec "${PYTHON:-python3}" -m verl_bridge.integrations.verl_tool.main_ppo \
  +verl_bridge="$arm" \
  verl_bridge.retriever.url="${RETRIEVER_URL:-http://127.0.0.1:8000}" \
  verl_bridge.retriever.corpus="${CORPUS:-data/wiki-18.jsonl}" \
  verl_bridge.retriever.index="${INDEX:-data/e5_Flat.index}" \
  verl_bridge.retriever.encoder="${ENCODER:-intfloat/e5-base-v2}" \
  verl_bridge.retriever.family=e5 \
  verl_bridge.retriever.threads=16 \
  verl_bridge.retriever.load_timeout=1800 \
  verl_bridge.retriever.shown=3 \
  verl_bridge.retriever.top_k=10 \
  verl_bridge.retriever.lora_rank=16 \
  verl_bridge.bridge.gamma=0.25 \
  verl_bridge.bridge.lr=1e-5 \
  verl_bridge.bridge.tau_retrieval=0.4 \
  verl_bridge.bridge.tau_posterior=0.5 \
  +reward_model.reward_kwargs.format_weight=0.0 \
  algorithm.adv_estimator=grpo \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=512 \
  data.max_prompt_length=1024 \
  data.max_response_length=6144 \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-3B}" \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.strategy=fsdp \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.agent.enable_agent=True \
  actor_rollout_ref.agent.tool_server_url="${TOOL_URL:-http://127.0.0.1:5000}/get_observation" \
  actor_rollout_ref.agent.action_stop_tokens="$here/fragments/action_stop_tokens.txt" \
  actor_rollout_ref.agent.max_turns=4 \
  actor_rollout_ref.agent.max_obs_length=500 \
  actor_rollout_ref.agent.max_prompt_length=1024 \
  actor_rollout_ref.agent.max_response_length=6144 \
  actor_rollout_ref.agent.enable_mtrl=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.mode=async \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
  trainer.project_name=verl_bridge \
  trainer.experiment_name="verl-tool-$arm" \
  trainer.n_gpus_per_node=4 \
  trainer.nnodes=1 \
  trainer.save_freq=50 \
  trainer.test_freq=50 \
  trainer.total_training_steps=250 \
  "${@:2}"
