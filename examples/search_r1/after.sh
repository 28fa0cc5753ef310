#!/usr/bin/env bash
# before.sh on verl 0.9.1 with verl_bridge: the same agent, and a retriever and credit that learn.
set -euo pipefail
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  +verl_bridge=search_r1 trainer.v1.trainer_mode=bridge_sync verl_bridge.{bridge,gca}.enable=true \
  data.train_files="${DATA_DIR:-data/nq_hotpotqa_train}/train.parquet" \
  data.val_files="${DATA_DIR:-data/nq_hotpotqa_train}/test.parquet" \
  data.shuffle=True \
  data.train_batch_size=512 data.val_batch_size=256 \
  data.max_prompt_length=2048 data.max_response_length=4500 \
  algorithm.adv_estimator=grpo \
  actor_rollout_ref.model.path="${BASE_MODEL:-Qwen/Qwen2.5-3B}" \
  actor_rollout_ref.model.enable_gradient_checkpointing=true actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285 \
  actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.fsdp_config.param_offload=true \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=true actor_rollout_ref.ref.fsdp_config.param_offload=True \
  actor_rollout_ref.rollout.log_prob_micro_batch_size=128 actor_rollout_ref.ref.log_prob_micro_batch_size=128 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.temperature=1 \
  trainer.logger="['wandb']" trainer.project_name=Search-R1 trainer.experiment_name=search-r1-grpo \
  trainer.val_only=false trainer.val_before_train=true \
  trainer.default_hdfs_dir=null trainer.n_gpus_per_node=8 trainer.nnodes=1 \
  trainer.save_freq=100 trainer.test_freq=100 trainer.total_epochs=15 trainer.total_training_steps=1005 \
  verl_bridge.retriever.{corpus="${ASSETS:-data}"/wiki-18.jsonl,index="${ASSETS:-data}"/e5_Flat.index,encoder=intfloat/e5-base-v2,family=e5,threads=16,load_timeout=1800,deadline=600} \
  "$@"
