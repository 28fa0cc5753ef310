"""What is asked of FAISS: making, reading and searching indexes other than our own exact one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge.retrieval.manifest import faiss_header

if TYPE_CHECKING:
    import numpy as np

TRAINING_SAMPLE = 200_000  # documents that clusters and codes are learned from, at most


def empty_index(dim: int, factory: str) -> Any:
    """An index for inner products by its factory string. Raises ValueError when FAISS does not know it."""
    import faiss

    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(f"index factory {factory!r} is unknown to FAISS for {dim} dimensions; try 'Flat'") from error


def fill_index(index: Any, vectors: np.ndarray, factory: str, batch_size: int) -> None:
    """Trains on a bounded sample where the kind needs it, then adds all vectors (documents, dim) batch by batch.

    Raises:
        ValueError: FAISS cannot make such an index of so few documents.
    """
    import numpy as np

    count = len(vectors)
    try:
        if not index.is_trained:
            rows = np.sort(np.random.default_rng(0).choice(count, min(count, TRAINING_SAMPLE), replace=False))
            index.train(vectors[rows].astype(np.float32))
        for start in range(0, count, batch_size):
            index.add(vectors[start : start + batch_size].astype(np.float32))
    except RuntimeError as error:
        raise ValueError(
            f"index factory {factory!r} cannot be made from {count} documents ({_reason(error)}); use 'Flat' or "
            "fewer clusters: the vectors are kept, the next build starts from them"
        ) from error


def set_search_parameters(index: Any, parameters: str) -> None:
    """Sets what trades speed for accuracy, such as ``nprobe=32`` or ``efSearch=64``, by FAISS's own names.

    Args:
        index: a FAISS index; None for exact search, which has nothing to set.
        parameters: ``name=value``, comma-separated.

    Raises:
        ValueError: not of that form, or a parameter that the index does not have.
    """
    import faiss

    if index is None or not isinstance(index, faiss.Index):
        raise ValueError(f"search parameters {parameters!r} do not apply to exact search; leave them out")
    try:
        faiss.ParameterSpace().set_index_parameters(index, parameters)
    except RuntimeError as error:
        raise ValueError(
            f"search parameters {parameters!r} do not fit a {type(index).__name__} ({_reason(error)}); "
            "give name=value with whole numbers, such as nprobe=32 for IVF or efSearch=64 for HNSW"
        ) from error


def read_index(file: str | os.PathLike) -> Any:
    """A FAISS index from its file; a flat one is mapped, not read. Raises ValueError on a damaged file."""
    import faiss

    flat = faiss_header(file)[0] in (b"IxFI", b"IxF2", b"IxFl")
    try:
        return faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC if flat else 0)
    except (RuntimeError, MemoryError) as error:
        raise ValueError(f"{file} is damaged or of an unknown kind ({_reason(error)})") from error


class _FlatVectors:
    """Lends numpy the vectors of a flat index, and lives as long as an array looks at them."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.__array_interface__ = {
            "shape": (index.ntotal, index.d),
            "typestr": "<f4",
            "data": (int(index.get_xb()), True),  # read-only
            "version": 3,
        }


def flat_vectors(index: Any) -> np.ndarray | None:
    """The vectors of a flat index, float32 (documents, dim), without a copy; None for an index of another kind."""
    import faiss
    import numpy as np

    return np.asarray(_FlatVectors(index)) if isinstance(index, faiss.IndexFlat) and index.ntotal else None


def open_bare(file: Path) -> tuple[Any, np.ndarray | None]:
    """A FAISS file without a manifest: the index, and the vectors of a flat one, float32 (documents, dim).

    Raises:
        ValueError: it cannot be read, or its ranking is not the one by inner product that the encoders are made for.
    """
    import faiss

    index = read_index(file)
    vectors = flat_vectors(index)
    if isinstance(index, faiss.IndexIDMap):
        raise ValueError(f"{file} maps ids of its own, but row i has to be document i; add the vectors without ids")
    if index.metric_type == faiss.METRIC_INNER_PRODUCT:
        return index, vectors
    if vectors is None or index.metric_type != faiss.METRIC_L2:
        raise ValueError(
            f"{file} is a {type(index).__name__} with metric {index.metric_type}, not inner product; build it with "
            "faiss.METRIC_INNER_PRODUCT"
        )
    shortest, longest = _lengths(vectors)
    if longest - shortest > 1e-3 * longest:
        raise ValueError(
            f"{file} ranks by L2 distance and its vectors have lengths from {shortest:.4g} to {longest:.4g}: only for "
            "equal lengths is that the ranking by inner product; build it with faiss.METRIC_INNER_PRODUCT"
        )
    return index, vectors


def _lengths(vectors: np.ndarray) -> tuple[float, float]:
    """Least and greatest length of a vector."""
    import numpy as np

    parts = [np.linalg.norm(vectors[i : i + 65_536], axis=1) for i in range(0, len(vectors), 65_536)]
    return float(min(part.min() for part in parts)), float(max(part.max() for part in parts))


def give_back_vectors(index: Any) -> None:
    """Makes ``reconstruct_batch`` work: an inverted file needs a table of where rows went (8 bytes per document)."""
    import faiss

    inverted = faiss.try_extract_index_ivf(index)
    if inverted is not None:
        inverted.make_direct_map()


def to_gpu(index: Any, device: str) -> Any:
    """The index on a GPU (``cuda`` or ``cuda:1``). Raises ValueError when FAISS has none or not for this kind."""
    import faiss

    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() < 1:
        raise ValueError(
            f"device {device!r} was asked for, but this FAISS sees no GPU; install faiss-gpu, use device 'cpu', "
            "or factory 'Flat', which needs no FAISS"
        )
    try:
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), int(device.partition(":")[2] or 0), index)
    except RuntimeError as error:
        raise ValueError(
            f"a {type(index).__name__} cannot be searched on a GPU ({_reason(error)}); use device 'cpu'"
        ) from error


def _reason(error: Exception) -> str:
    """FAISS's message without the C++ signature before it and the stack after it."""
    return " ".join(str(error).rsplit("Error: ", 1)[-1].split())[:200]
