"""vLLM's worker for a CPU rollout whose weights change: verl's extension, with the weights left where they are.

vLLM packs the weights of linear layers for oneDNN when it has loaded a model and keeps nothing of the shape that verl
writes new weights into. Named by ``engine_kwargs.vllm.worker_extension_cls``, so this module is imported in the worker
before the model is loaded.
"""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm import _custom_ops

if not isinstance(_custom_ops._supports_onednn, bool):
    raise RuntimeError(
        "vllm._custom_ops._supports_onednn is no switch any more: find this vLLM's way to packed weights"
    )
_custom_ops._supports_onednn = False


class PlainWeightsExtension(vLLMColocateWorkerExtension):
    """verl's extension, unchanged."""
