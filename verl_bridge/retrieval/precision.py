"""Which number format to compute in, and on how many threads."""

from __future__ import annotations

from verl_bridge.config.schema import DTYPES


def resolve_dtype(compute_dtype: str, device: str) -> str:
    """The number format to compute in: ``auto`` is bfloat16 where the device multiplies it natively, else float32.

    Raises:
        ValueError: an unknown name, or float16 without a GPU (no CPU gains by it).
    """
    import torch

    if compute_dtype not in DTYPES:
        raise ValueError(f"compute_dtype {compute_dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    on_cpu = torch.device(device).type == "cpu"
    if compute_dtype == "float16" and on_cpu:
        raise ValueError("compute_dtype 'float16' needs a GPU; use 'bfloat16', 'float32' or 'auto' on a CPU")
    if compute_dtype != "auto":
        return compute_dtype
    if on_cpu:
        return "bfloat16" if torch.cpu.get_capabilities().get("avx512_bf16") else "float32"
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"


def set_threads(threads: int) -> None:
    """CPU threads of encoder and search, for the calling thread: OpenMP keeps its count per thread."""
    import faiss
    import torch

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
