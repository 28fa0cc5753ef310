#!/usr/bin/env bash
# Usage: run.sh [hydra overrides]   e.g. run.sh verl_bridge=baseline trainer.n_gpus_per_node=8
# CONFIG=grpo runs plain verl on the same settings.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  --config-dir "$here" --config-name "${CONFIG:-bridge_gca}" "$@"
