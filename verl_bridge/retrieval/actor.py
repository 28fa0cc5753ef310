"""The retriever as one Ray actor: every rollout worker searches it, the trainer updates it.

All model work runs on one thread of its own, in turn: an answer is from exactly one adapter version, and the event loop
stays free. Concurrent callers share an encoder batch. Ray is imported only where it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from verl_bridge.qa.answers import alias_hit
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import load_encoders
from verl_bridge.retrieval.index import DocumentIndex
from verl_bridge.retrieval.retriever import Retriever, check_call


class RetrieverService:
    """What the actor does; usable without Ray inside any event loop.

    Args:
        corpus: path of the corpus.
        index: folder of its index.
        encoder: sentence-transformers folder or hub name.
        revision: hub revision of the encoder.
        query_prefix: put before every query.
        max_length: longest query in tokens, None for the model's own limit.
        normalize: see :class:`verl_bridge.retrieval.encoder.BaseEncoder`.
        lora_rank: rank of the query adapter.
        top_k: candidates per query.
        updater: makes the learner from (query encoder, index), such as ``partial(RetrieverUpdater, lr=1e-5)``;
            None serves only.
        cache_dir: where a ``.gz`` corpus is unpacked.
        max_batch: most queries in one encoder batch.
        max_wait: seconds a query waits for company.
        threads: CPU threads for encoder and search.
        seed: of the adapter's start.

    Raises:
        ValueError: corpus, index or encoder missing or not made for one another.
    """

    def __init__(
        self,
        *,
        corpus: str,
        index: str,
        encoder: str,
        revision: str | None = None,
        query_prefix: str = "",
        max_length: int | None = None,
        normalize: bool | None = None,
        lora_rank: int = 16,
        top_k: int = 10,
        updater: Callable[[Any, Any], Any] | None = None,
        cache_dir: str | None = None,
        max_batch: int = 128,
        max_wait: float = 0.003,
        threads: int = 1,
        seed: int = 0,
    ) -> None:
        self._max_batch, self._max_wait = max_batch, max_wait
        # OpenMP keeps its thread count per thread, so it is set on the thread that works
        self._worker = ThreadPoolExecutor(1, "retriever", initializer=partial(_set_threads, threads))

        def build() -> tuple[Retriever, Any]:
            from transformers.utils import logging

            logging.disable_progress_bar()
            opened = Corpus.open(corpus, cache_dir)
            queries, _ = load_encoders(
                encoder,
                query_prefix=query_prefix,
                lora_rank=lora_rank,
                seed=seed,
                revision=revision,
                max_length=max_length,
                normalize=normalize,
            )
            vectors = DocumentIndex.load(index, opened, queries)
            return Retriever(opened, vectors, queries, top_k), None if updater is None else updater(queries, vectors)

        self._retriever, self._updater = self._worker.submit(build).result()
        self._waiting: list[tuple[list[str], int, asyncio.Future]] = []
        self._arrived = asyncio.Event()
        self._batcher: asyncio.Task | None = None

    async def search(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """One answer per query: ``status``, ``error``, ``ids``, ``scores``, ``documents``, ``adapter_version``.

        Raises:
            ValueError: queries or ``top_k`` of another type or range.
        """
        top_k = self._retriever.top_k if top_k is None else top_k
        queries = check_call(queries, top_k)  # refused here, so that it fails nobody else's batch
        if self._batcher is None:
            self._batcher = asyncio.create_task(self._serve())
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((queries, top_k, answer))
        self._arrived.set()
        return await answer

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            if sum(len(queries) for queries, _, _ in self._waiting) < self._max_batch:
                await asyncio.sleep(self._max_wait)
            batch, size = [], 0
            while self._waiting and (not batch or size + len(self._waiting[0][0]) <= self._max_batch):
                batch.append(self._waiting.pop(0))
                size += len(batch[-1][0])
            if not self._waiting:
                self._arrived.clear()
            try:
                answers = await self._run(self._search, [(queries, top_k) for queries, top_k, _ in batch])
            except Exception as error:  # every caller of the batch gets it, and the loop serves on
                answers = [error] * len(batch)
            for (_, _, future), answer in zip(batch, answers, strict=True):
                if future.done():  # the caller went away
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _search(self, calls: list[tuple[list[str], int]]) -> list[list[dict[str, Any]]]:
        found: dict[int, list[dict[str, Any]]] = {}
        for depth in {top_k for _, top_k in calls}:  # nearly always one
            group = [i for i, (_, top_k) in enumerate(calls) if top_k == depth]
            answers = iter(self._retriever.search([query for i in group for query in calls[i][0]], depth))
            found |= {i: [next(answers).to_dict() for _ in calls[i][0]] for i in group}
        return [found[i] for i in range(len(calls))]

    async def documents(self, ids: Sequence[str]) -> list[dict[str, str]]:
        """The documents with these ids as ``{id, title, text}``. Raises KeyError for an unknown id."""
        return await self._run(lambda: [vars(self._retriever.corpus.by_id(i)) for i in ids])

    async def update(self, batch: Any) -> Any:
        """One update by the learner; searches wait and then see the new version. Raises ValueError without learner."""
        return await self._run(self._learner().update, batch)

    async def version(self) -> int:
        """The version of the adapter that serves now."""
        return await self._run(lambda: self._retriever.version)

    async def save(self, directory: str) -> None:
        """Writes the learner's checkpoint, which holds the adapter in ``adapter/``."""
        await self._run(self._learner().save, directory)

    async def save_adapter(self, directory: str) -> None:
        """Writes the serving adapter alone, in PEFT's format."""
        await self._run(self._retriever.encoder.save_adapter, directory)

    async def load(self, directory: str) -> None:
        """Continues from a learner's checkpoint; it serves from the next search on."""
        await self._run(self._learner().load, directory)

    async def load_adapter(self, directory: str, version: int) -> None:
        """Serves a saved adapter from the next search on, for evaluation without a learner."""
        await self._run(self._retriever.load_adapter, directory, version)

    async def recall_probe(
        self, probe: Sequence[tuple[str, Sequence[str]]], shown: int, top_k: int | None = None
    ) -> dict[str, float]:
        """Shares of a fixed probe set whose passages hold a gold alias.

        Args:
            probe: (query, golden answers) pairs.
            shown: passages the model would see.
            top_k: candidates, the retriever's own number by default.

        Returns:
            ``recall_shown`` and ``recall_top_k`` as shares, ``n`` and ``adapter_version``.
        """
        return await self._run(self._recall, list(probe), shown, top_k)

    def _recall(self, probe: list[tuple[str, Sequence[str]]], shown: int, top_k: int | None) -> dict[str, float]:
        if not probe:
            raise ValueError("the recall probe is empty; give at least one (query, golden answers) pair")
        within_shown = within_all = 0
        for start in range(0, len(probe), self._max_batch):
            part = probe[start : start + self._max_batch]
            found = self._retriever.search([query for query, _ in part], top_k)
            for (_, golds), answer in zip(part, found, strict=True):
                hits = [alias_hit(f"{document.title} {document.text}", golds) for document in answer.documents]
                within_shown += any(hits[:shown])
                within_all += any(hits)
        return {
            "recall_shown": within_shown / len(probe),
            "recall_top_k": within_all / len(probe),
            "n": float(len(probe)),
            "adapter_version": float(self._retriever.version),
        }

    def _learner(self) -> Any:
        if self._updater is None:
            raise ValueError("this retriever serves only; start it with an updater (verl_bridge.bridge.enable=true)")
        return self._updater

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)


def _set_threads(threads: int) -> None:
    import faiss
    import torch

    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)


def start_retriever(
    name: str, *, corpus: str, index: str, encoder: str, timeout: float = 300.0, **settings: Any
) -> Any:
    """Starts the named actor and waits until it serves; keep the handle, the actor ends with it.

    Args:
        name: the actor's name in this job's namespace.
        corpus, index, encoder: see :class:`RetrieverService`.
        timeout: seconds to wait for the models to load.
        settings: the other settings of :class:`RetrieverService`.

    Raises:
        ValueError: a setting or path that is missing (checked before an actor starts), or the name is taken.
        RuntimeError: the actor could not load; the cause is in the message.
    """
    import ray

    for key, value in (("corpus", corpus), ("index", index), ("encoder", encoder)):
        if not value:
            raise ValueError(f"verl_bridge.retriever.{key}={value!r} is not set; give the {key} to use")
        if key != "encoder" and not Path(value).exists():  # an encoder may be a hub name
            raise ValueError(f"verl_bridge.retriever.{key}={value!r} does not exist; give the path of the {key}")
    try:
        handle = (
            ray.remote(RetrieverService)
            .options(name=name, num_cpus=0)
            .remote(corpus=corpus, index=index, encoder=encoder, **settings)
        )
    except ValueError as error:
        raise ValueError(
            f"verl_bridge.retriever.actor_name={name!r} is taken in this Ray job ({error}); choose another name"
        ) from error
    try:
        ray.get(handle.version.remote(), timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise RuntimeError(f"retriever {name!r} did not load within {timeout:.0f} s; raise the timeout") from error
    except ray.exceptions.RayActorError as error:
        cause = str(error).strip().splitlines()[-1]  # the rest is the actor's traceback
        raise RuntimeError(f"retriever {name!r} did not start: {cause}") from error
    return handle


def get_retriever(name: str) -> Any:
    """The running actor of this job. Raises RuntimeError that names the key and the fix when there is none."""
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        raise RuntimeError(
            f"no retriever actor named verl_bridge.retriever.actor_name={name!r} in this Ray job; the trainer "
            "(trainer.v1.trainer_mode=bridge_sync) starts it, or call start_retriever first and keep its handle"
        ) from None
