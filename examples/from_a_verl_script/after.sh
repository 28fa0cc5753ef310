#!/usr/bin/env bash
# before.sh with the key, the trainer's name and the retriever's two files.
set -euo pipefail
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="${DATA_DIR:-data}/train.parquet" \
  data.val_files="${DATA_DIR:-data}/test.parquet" \
  data.train_batch_size=256 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-3B}" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  trainer.n_gpus_per_node=8 \
  +verl_bridge=bridge_gca \
  trainer.v1.trainer_mode=bridge_sync \
  verl_bridge.retriever.corpus="${CORPUS:-data/corpus.jsonl}" \
  verl_bridge.retriever.index="${INDEX:-data/index}" \
  "$@"
