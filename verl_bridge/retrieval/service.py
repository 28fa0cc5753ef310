"""The retriever as a service in one process: many callers share encoder batches, and its adapter can change in between.

All model work runs on one thread of its own, in turn: an answer is from exactly one adapter version, and the event loop
stays free. The Ray actor and the HTTP server are two doors to this one room.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_bridge.files import sha256
from verl_bridge.retrieval.batching import Batcher
from verl_bridge.retrieval.precision import set_threads
from verl_bridge.retrieval.retriever import Call, Retriever, answer_calls, check_call, open_retriever


class VersionConflict(ValueError):
    """Another adapter was already published under this version."""


class RetrieverService:
    """Serves a retriever inside any event loop.

    Args:
        corpus: path of the corpus.
        index: folder of its index, or a bare FAISS file.
        updater: makes the learner from (query encoder, index), such as ``partial(RetrieverUpdater, lr=1e-5)``;
            None serves only.
        adapter: folder of a saved adapter to serve from the start; None starts with the frozen encoder.
        adapter_version: the version to start with.
        max_batch: most queries in one encoder batch.
        max_wait: seconds a query waits for others to batch with, while nothing runs.
        max_queue: most queries that wait; beyond it a call is refused.
        threads: CPU threads for encoder and search.
        settings: the other settings of :func:`verl_bridge.retrieval.retriever.open_retriever`: ``encoder``,
            ``query_prefix``, ``lora_rank``, ``top_k``, ``compute_dtype`` and so on.

    Raises:
        ValueError: corpus, index, encoder or adapter missing or not made for one another.
    """

    def __init__(
        self,
        *,
        corpus: str,
        index: str,
        updater: Callable[[Any, Any], Any] | None = None,
        adapter: str | None = None,
        adapter_version: int = 0,
        max_batch: int = 128,
        max_wait: float = 0.002,
        max_queue: int = 8192,
        threads: int = 1,
        **settings: Any,
    ) -> None:
        self._batcher = Batcher(
            self._search,
            max_batch=max_batch,
            max_wait=max_wait,
            max_queue=max_queue,
            initializer=partial(set_threads, threads),
        )
        self._published: dict[int, str] = {}  # version → SHA-256 of the bytes

        def build() -> tuple[Retriever, Any]:
            retriever = open_retriever(corpus=corpus, index=index, **settings)
            if adapter is not None:
                retriever.load_adapter(adapter, adapter_version)
                self._published[adapter_version] = sha256(Path(adapter) / "adapter_model.safetensors")
            learner = None if updater is None else updater(retriever.encoder.queries, retriever.index)
            return retriever, learner

        self._retriever, self._updater = self._batcher.call(build)

    # ---- searching ----

    @property
    def top_k(self) -> int:
        """Candidates per query when a call does not say."""
        return self._retriever.top_k

    @property
    def queue(self) -> Batcher:
        """The queue in front of the model: its length, its bounds, whether it drains."""
        return self._batcher

    def submit(self, queries: Sequence[str], top_k: int | None = None) -> asyncio.Future:
        """As :meth:`search`, as a future: cancelling it takes the call out of the queue."""
        top_k = self._retriever.top_k if top_k is None else top_k
        queries = check_call(queries, top_k)  # refused here, so that it fails nobody else's batch
        return self._batcher.submit((queries, top_k), len(queries))

    async def search(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """One answer per query: ``status``, ``error``, ``ids``, ``scores``, ``documents``, ``adapter_version``.

        All answers of a call are from one adapter version.

        Raises:
            ValueError: queries or ``top_k`` of another type or range.
            Busy: too many queries wait, or the service drains.
        """
        return await self.submit(queries, top_k)

    def _search(self, calls: list[Call]) -> list[list[dict[str, Any]]]:
        return answer_calls(self._retriever, calls, self._batcher.max_batch)

    async def scores(self, queries: Sequence[str], ids: Sequence[Sequence[str]]) -> list[list[float]]:
        """Scores of these documents for every query, by the stored vectors. Raises KeyError for an unknown id."""
        return await self._batcher.run(self._retriever.scores, queries, ids)

    async def documents(self, ids: Sequence[str]) -> list[dict[str, str]]:
        """The documents with these ids as ``{id, title, text}``. Raises KeyError for an unknown id."""
        return await self._batcher.run(lambda: [vars(self._retriever.corpus.by_id(i)) for i in ids])

    async def drain(self) -> None:
        """Refuses new searches from now on and returns when all that wait are answered."""
        await self._batcher.drain()

    def describe(self) -> dict[str, Any]:
        """What is served, without waiting for the worker: adapter version, documents, dimension, encoder."""
        return {
            "adapter_version": self._retriever.version,
            "documents": len(self._retriever.corpus),
            "dim": self._retriever.index.dim,
            "encoder": self._retriever.encoder.describe()["encoder"],
        }

    # ---- the adapter ----

    async def version(self) -> int:
        """The version of the adapter that serves now."""
        return await self._batcher.run(lambda: self._retriever.version)

    async def adapter(self) -> tuple[int, str]:
        """The version that serves now and the SHA-256 of its ``adapter_model.safetensors``."""
        return await self._batcher.run(self._adapter)

    def _adapter(self) -> tuple[int, str]:
        version = self._retriever.version
        if version not in self._published:
            return version, hashlib.sha256(self._retriever.encoder.queries.adapter_bytes()).hexdigest()
        return version, self._published[version]

    async def adapter_bytes(self) -> tuple[int, bytes]:
        """The version that serves now and its ``adapter_model.safetensors``, for whoever publishes it elsewhere."""
        return await self._batcher.run(
            lambda: (self._retriever.version, self._retriever.encoder.queries.adapter_bytes())
        )

    async def publish(self, adapter: bytes, version: int, replace: bool = False) -> None:
        """Serves an adapter from the next batch on; doing it again changes nothing, so a retry is safe.

        A version below the one that serves is a roll-back and forgets the ones above it, so that a resumed training may
        publish those numbers again.

        Args:
            adapter: the bytes of its ``adapter_model.safetensors``.
            version: its number, at least 0.
            replace: whether it may take the place of other bytes under this number: for a training that begins, since
                every one begins at version 0.

        Raises:
            ValueError: it is not a safetensors file or does not fit, or the version is negative. The old one serves on.
            VersionConflict: other bytes were published under this version.
        """
        await self._batcher.run(self._publish, adapter, version, replace)

    def _publish(self, adapter: bytes, version: int, replace: bool) -> None:
        if type(version) is not int or version < 0:
            raise ValueError(f"adapter version {version!r} is not a whole number of at least 0")
        serving, current = self._adapter()
        known = current if version == serving else self._published.get(version)
        digest = hashlib.sha256(adapter).hexdigest()
        if known is not None and known != digest and not replace:
            raise VersionConflict(
                f"adapter version {version} was published with other bytes (SHA-256 {known[:12]}, now {digest[:12]}); "
                "publish under another version, or roll back below it first"
            )
        if version != serving or digest != current:
            self._retriever.load_adapter(adapter, version)
        self._published = {number: known for number, known in self._published.items() if number < version}
        self._published[version] = digest

    async def adapter_size(self) -> int:
        """Bytes of the adapter's file."""
        return await self._batcher.run(lambda: len(self._retriever.encoder.queries.adapter_bytes()))

    async def save_adapter(self, directory: str) -> None:
        """Writes only the serving adapter, in PEFT's format."""
        await self._batcher.run(self._retriever.encoder.save_adapter, directory)

    # ---- the learner ----

    async def update(self, batch: Any) -> Any:
        """One update by the learner; searches wait and then see the new version. Raises ValueError without learner."""
        return await self._batcher.run(self._changed, self._learner().update, batch)

    async def known_versions(self) -> list[int]:
        """The versions that a turn to learn from may have been served by."""
        return await self._batcher.run(lambda: self._learner().known_versions())

    async def save(self, directory: str) -> None:
        """Writes the learner's checkpoint, which holds the adapter in ``adapter/``."""
        await self._batcher.run(self._learner().save, directory)

    async def load(self, directory: str) -> None:
        """Continues from a learner's checkpoint; it serves from the next search on."""
        await self._batcher.run(self._changed, self._learner().load, directory)

    def _learner(self) -> Any:
        if self._updater is None:
            raise ValueError("this retriever serves only; start it with an updater (verl_bridge.bridge.enable=true)")
        return self._updater

    def _changed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._published.clear()  # the numbers mean other adapters from now on
        return function(*arguments)
