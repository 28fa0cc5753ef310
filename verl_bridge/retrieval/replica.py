"""What runs in the cluster for a served retriever: replicas, and the keeper of the adapter. See ``deployment.py``."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from typing import Any

from verl_bridge.retrieval.keeper import Keeper
from verl_bridge.retrieval.retriever import Call, Retriever, answer_calls, check_call, open_retriever
from verl_bridge.retrieval.sharding import IndexShard, ShardedSearch, own_thread

NAMESPACE = "verl_bridge"
DEPLOYMENT = "retriever"


def keeper_name(name: str) -> str:
    """The Ray actor name of an application's keeper, in ``NAMESPACE``."""
    return f"verl_bridge.serving.{name}"


class Replica:
    """One copy of the retriever inside Serve.

    Args:
        settings: of :func:`verl_bridge.retrieval.retriever.open_retriever`.
        name: of the application, to find its keeper.
        shards: Serve handles of the shards in order; none when the replica holds the index itself.
        threads: CPU threads for encoder and search.

    Raises:
        ValueError: corpus, index or encoder missing or not made for one another.
    """

    def __init__(self, settings: dict[str, Any], name: str, shards: Sequence[Any], threads: int) -> None:
        import ray
        from ray import serve

        self._keeper = ray.get_actor(keeper_name(name), namespace=NAMESPACE)
        self._worker = own_thread(threads)
        self._retriever = self._worker.submit(_open, settings, shards).result()
        self._max_batch, self._answered, self._ready = 1, 0, False
        self._gather = serve.batch(batch_size_fn=_batch_size)(self._answer_all)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve at the start, when ``user_config`` changes, and when replicas are numbered anew; searches go
        on meanwhile.

        Args:
            user_config: ``max_batch`` (queries), ``max_wait`` (seconds) and ``adapter_version``, which only tells that
                there is a new one: what the keeper has is served, and that is never older.
        """
        self._max_batch = user_config["max_batch"]
        self._gather.set_max_batch_size(self._max_batch)
        self._gather.set_batch_wait_timeout_s(user_config["max_wait"])
        if self._ready and user_config["adapter_version"] == self._retriever.version:
            return
        version, adapter = await self._keeper.current.remote()
        if version != self._retriever.version:
            await self._run(self._retriever.load_adapter, adapter, version)
        self._ready = True

    async def search(self, queries: list[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """One answer per query, all of one version; see ``Retrieved.to_dict``. Raises ValueError on wrong arguments."""
        top_k = self._retriever.top_k if top_k is None else top_k
        return await self._gather((check_call(queries, top_k), top_k))

    async def _answer_all(self, calls: list[Call]) -> list[list[dict[str, Any]]]:
        answers = await self._run(answer_calls, self._retriever, calls, self._max_batch)
        self._answered += sum(map(len, answers))
        return answers

    async def describe(self) -> tuple[str, int, int]:
        """This replica's id, the version it serves and how many queries it has answered."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, self._retriever.version, self._answered

    async def try_adapter(self, adapter: bytes) -> None:
        """Raises ValueError when the adapter cannot be served; what is served stays as it is."""
        await self._run(_try, self._retriever, adapter)

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)


def _open(settings: dict[str, Any], shards: Sequence[Any]) -> Retriever:
    return open_retriever(**settings, searcher=ShardedSearch(shards) if shards else None)


def _batch_size(calls: list[Call]) -> int:
    """Queries in a batch. A call with more than a batch holds goes alone: its answers are to be of one version."""
    return 1 if len(calls) == 1 else sum(len(queries) for queries, _ in calls)


def _try(retriever: Retriever, adapter: bytes) -> None:
    queries = retriever.encoder.queries
    state, version = queries.adapter_state(), queries.adapter_version
    retriever.load_adapter(adapter, version)  # as it will be served: a query is tried too
    queries.set_adapter_state(state, version)


class ApplicationKeeper(Keeper):
    """Starts the application and keeps the adapter that serves now; version 0 is every encoder's own start.

    One process deploys, so that Serve sees the same application each time and changes it in place.

    Args:
        name: of the application.
        settings: of :func:`verl_bridge.retrieval.retriever.open_retriever`.
        shape: ``replicas``, ``shards``, ``threads``, ``max_batch``, ``max_wait`` and Serve's ``options`` of all parts.
    """

    def __init__(self, name: str, settings: dict[str, Any], shape: dict[str, Any]) -> None:
        super().__init__()
        self._name, self._settings, self._shape = name, settings, shape
        self._code = uuid.uuid4().hex

    def deploy(self) -> None:
        """Tells Serve what is to run, and with which version; returns at once."""
        from ray import serve

        serve.start(proxy_location="Disabled")
        serve.run_many(
            [serve.RunTarget(self._application(), name=self._name, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _application(self) -> Any:
        shape, settings = self._shape, self._settings
        place = (settings.get("search_dtype", "auto"), settings.get("device", "cpu"), shape["threads"])
        count = shape["shards"] if shape["shards"] > 1 else 0
        shards = [
            self._deployment(IndexShard, f"shard_{i}").bind(settings["index"], i, count, *place) for i in range(count)
        ]
        batching = {key: shape[key] for key in ("max_batch", "max_wait")}
        return self._deployment(
            Replica,
            DEPLOYMENT,
            user_config={"adapter_version": self.current()[0], **batching},
        ).bind(settings, self._name, shards, shape["threads"])

    def _deployment(self, part: type, name: str, **options: Any) -> Any:
        from ray import serve

        deployment = serve.deployment(part).options(
            name=name,
            num_replicas=self._shape["replicas"],
            # one batch at work and one that gathers; what comes beyond waits at its caller for whoever is free first
            max_ongoing_requests=max(2 * self._shape["max_batch"], 16),
            health_check_period_s=1.0,  # Serve notices a dead replica by this check
            graceful_shutdown_timeout_s=5.0,
            graceful_shutdown_wait_loop_s=0.1,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
            **options,
            **self._shape["options"],
        )
        # without a version of its own every deploy counts as new code, which restarts all replicas
        return deployment.options(version=self._code, _internal=True)

    def publish(self, adapter: bytes, version: int) -> int:
        """Makes a version the one to serve and tells Serve; returns how many replicas are to have it.

        Raises:
            ValueError: the version is not newer than the one that serves.
        """
        serving, known = self.current()
        again = (version, adapter) == (serving, known)  # the last time it did not get through
        if version <= serving and not again:
            digest = "none" if known is None else hashlib.sha256(known).hexdigest()[:12]
            raise ValueError(
                f"version {version} is not newer than {serving} (sha256 {digest}), which serves; "
                "publish other bytes under a higher number"
            )
        self.keep(version, adapter)
        self.deploy()
        return self._shape["replicas"]
