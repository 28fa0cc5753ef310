#!/usr/bin/env bash
# Submit a training to a running Ray cluster and follow it to its end; exits with 1 when the job failed.
# RAY_ADDRESS is the cluster's dashboard. Every further argument is a Hydra override of the job's.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export RAY_ADDRESS="${RAY_ADDRESS:-http://127.0.0.1:8265}"
# A job joins the cluster it runs in, so what a recipe would start a Ray of its own with has to go.
exec "${RAY:-ray}" job submit --runtime-env "${RUNTIME_ENV:-$here/runtime_env.yaml}" -- \
  "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  "+verl_bridge=${ARM:-bridge_gca}" \
  trainer.v1.trainer_mode=bridge_sync \
  ray_kwargs.ray_init.num_cpus=null \
  verl_bridge.retriever.corpus="${CORPUS:?the JSONL of the documents, as every node sees it}" \
  verl_bridge.retriever.index="${INDEX:?the folder of the index, as every node sees it}" \
  "$@"
