#!/usr/bin/env bash
# The GPU tests in an environment of yours (PYTHON, by default python3), with the reason of every test that is skipped.
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-python3}"
"$python" -c 'import torch, pytest' || { echo "$python lacks torch or pytest: set PYTHON to your environment's" >&2; exit 2; }
"$python" -c 'import torch; print("torch", torch.__version__, "|", torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device: the cuda cases are skipped")'
exec "$python" -m pytest -rs tests/gpu "$@"
