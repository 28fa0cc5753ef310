"""An exact index in slices: every shard searches its own documents, and the best of all are merged.

A shard holds only vectors: no encoder, no text and so no adapter version; whoever asks has those. See
``deployment.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge.retrieval.precision import set_threads

if TYPE_CHECKING:
    import numpy as np

ATTEMPTS = 3  # a search changes nothing, so that it is asked again when the one asked dies; death is noticed late
PAUSE = 0.2  # seconds before a search is asked again


def shard_bounds(documents: int, shards: int) -> list[tuple[int, int]]:
    """First row and row after the last of each shard: contiguous, in order, equal sizes up to one document."""
    return [(documents * i // shards, documents * (i + 1) // shards) for i in range(shards)]


def merge_top(parts: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The best ``k`` of several answers to the same queries, best first; equal scores by row.

    Args:
        parts: scores and rows of each shard, both (queries, documents found), rows counted over the whole index.
        k: documents per query; fewer come back where all shards together found fewer.

    Returns:
        Scores and rows, (queries, min(k, documents found by all)).
    """
    import numpy as np

    scores = np.concatenate([scores for scores, _ in parts], axis=1)
    rows = np.concatenate([rows for _, rows in parts], axis=1)
    order = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1)


def own_thread(threads: int) -> ThreadPoolExecutor:
    """One worker thread for all model work of a process, where torch and FAISS use ``threads`` CPU threads.

    Work is done in turn, so that no search sees half an adapter, and the event loop of the process stays free.
    """
    return ThreadPoolExecutor(1, "retriever", initializer=partial(set_threads, threads))


class IndexShard:
    """Searches one contiguous slice of the document vectors exactly; a Serve deployment of its own.

    Args:
        index: the index, as :func:`verl_bridge.retrieval.retriever.open_retriever` takes it.
        shard: which slice, from 0.
        shards: slices in all.
        search_dtype: see :class:`verl_bridge.retrieval.exact.ExactSearch`.
        device: torch device of the slice.
        threads: CPU threads of a search.

    Raises:
        ValueError: the index is damaged, or not an exact one.
    """

    def __init__(self, index: str, shard: int, shards: int, search_dtype: str, device: str, threads: int) -> None:
        from verl_bridge.retrieval.exact import ExactSearch

        self._worker = own_thread(threads)
        vectors = exact_vectors(index)
        self.documents, self.dim = vectors.shape
        self.start, self.end = shard_bounds(self.documents, shards)[shard]
        self._search: ExactSearch | None = None
        if self.end > self.start:  # there may be more shards than documents
            part = vectors[self.start : self.end]
            build = partial(ExactSearch, part, compute_dtype=search_dtype, device=device)
            self._search = self._worker.submit(build).result()

    async def describe(self) -> tuple[int, int, int, int]:
        """First row, row after the last, documents and dimension of the whole index."""
        return self.start, self.end, self.documents, self.dim

    async def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The nearest documents of this slice.

        Args:
            queries: finite float32, (queries, dim).
            k: documents per query.

        Returns:
            float32 scores and int64 rows of the whole index, both (queries, min(k, documents of the slice)).
        """
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._find, queries, k)

    def _find(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        if self._search is None:
            return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        # what arrives through the object store is read-only, and torch wants arrays it could write to
        scores, rows = self._search.search(np.array(queries), min(k, self._search.ntotal))
        return scores, rows + self.start


class ShardedSearch:
    """All shards as one index, with the calls of a FAISS index. Blocks; for a worker thread, not for an event loop.

    Args:
        handles: Serve handles of the shards in order.
        timeout: seconds for the answers to a search. The start waits for the shards as long as it takes them.

    Raises:
        ValueError: the shards are not the slices of one index.
    """

    def __init__(self, handles: Sequence[Any], timeout: float = 60.0) -> None:
        self._handles, self._timeout = list(handles), timeout
        shards = self._ask(lambda handle: handle.describe.remote(), None)
        self.ntotal, self.d = shards[0][2:]
        found = [shard[:2] for shard in shards]
        wanted = shard_bounds(self.ntotal, len(shards))
        if found != wanted or any(shard[2:] != (self.ntotal, self.d) for shard in shards):
            raise ValueError(
                f"the shards hold rows {found} of indexes of {[shard[2:] for shard in shards]} documents and "
                f"dimensions, not {wanted} of one; give every node the same index"
            )

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores (float32) and rows (int64) of the nearest documents of all shards, both (queries, min(k, ntotal))."""
        return merge_top(self._ask(lambda handle: handle.search.remote(queries, k), self._timeout), k)

    def _ask(self, call: Callable[[Any], Any], timeout: float | None) -> list[Any]:
        """The answers of all shards, which work at the same time; a shard that dies meanwhile is asked again."""
        from ray.exceptions import RayError, RayTaskError

        started = time.monotonic()
        responses = [call(handle) for handle in self._handles]
        answers = []
        for handle, response in zip(self._handles, responses, strict=True):
            for attempt in range(ATTEMPTS):
                try:
                    left = None if timeout is None else max(started + timeout - time.monotonic(), 0.0)
                    answers.append(response.result(timeout_s=left))
                    break
                except RayTaskError:  # the shard lives and refused
                    raise
                except RayError:
                    if attempt + 1 == ATTEMPTS:
                        raise
                    time.sleep(PAUSE)
                    response = call(handle)
        return answers


def exact_vectors(index: str) -> np.ndarray:
    """The stored vectors of an exact index, (documents, dim). Raises ValueError when it is another kind of index."""
    from verl_bridge.retrieval.faiss_index import open_bare
    from verl_bridge.retrieval.manifest import check_index, read_vectors

    kind = check_index(index)["factory"]
    if Path(index).is_file():
        bare, vectors = open_bare(Path(index))
        kind = f"that FAISS calls {type(bare).__name__}"
    else:
        vectors = read_vectors(index) if kind == "Flat" else None
    if vectors is None:
        raise ValueError(
            f"index {index} is of kind {kind}, and shards search exactly; rebuild it with factory Flat or set shards=1"
        )
    return vectors
