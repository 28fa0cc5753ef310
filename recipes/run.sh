#!/usr/bin/env bash
# Usage: run.sh RECIPE [--dry-run] [hydra overrides]   e.g. run.sh bridge_qwen2.5-3b trainer.n_gpus_per_node=8
# --dry-run composes and checks the recipe up to the point where workers would start, and says what it comes to.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
recipe="${1:?which recipe? one of: $(cd "$here" && echo *.yaml)}"
exec "${PYTHON:-python3}" -m verl_bridge.cli train --config-dir "$here" --config-name "${recipe%.yaml}" "${@:2}"
