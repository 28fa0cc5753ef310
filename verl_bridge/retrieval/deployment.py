"""The retriever as a Ray Serve application: replicas and shards over the nodes of a cluster, used through handles.

Three parts. **Replicas** hold corpus, query encoder and index, and gather concurrent searches into batches. With
``shards`` > 1 the vectors lie in **shards** instead, one deployment each, which a replica asks for every batch. The
**keeper** is one small actor with the bytes of the adapter that serves now. It starts the application, and publishes a
new version as Serve's ``user_config``, which replicas take in place, one fifth of them at a time and at least one.

The bytes themselves are not in ``user_config``: Serve's controller writes that to the cluster's key-value store and
sends it around at every change, and adapters have megabytes. Nor are they in a file, which other nodes may not see. A
replica always takes what the keeper has *now*, so one that was killed comes back with the current version, whichever
version it was started for. If the keeper is lost, replicas serve on, but new ones refuse to start: better none than a
stale one.

No HTTP proxy is started. Serve's replicas do open a port for one another, on every interface and without a setting for
it: as with all of Ray, the cluster's network has to be one you trust.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Sequence
from typing import Any

from verl_bridge.retrieval.replica import DEPLOYMENT, NAMESPACE, ApplicationKeeper, keeper_name
from verl_bridge.retrieval.retriever import check_call, open_retriever
from verl_bridge.retrieval.sharding import ATTEMPTS, PAUSE
from verl_bridge.retrieval.wire import failed_answer

POLL = 0.05  # seconds between two looks at the state of the application


class ServedRetriever:
    """A running application, in whatever process of the cluster; made by :func:`start_serving` or :func:`get_serving`.

    Only :meth:`search` is for event loops; call the others from a thread there (``asyncio.to_thread``).

    Args:
        name: of the application.
        keeper: handle of its keeper.
        deadline: seconds for a search, all its tries together.
    """

    def __init__(self, name: str, keeper: Any, deadline: float) -> None:
        from ray import serve

        self.name, self._keeper, self.deadline = name, keeper, deadline
        self._handle = serve.get_app_handle(name)

    async def search(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """One answer per query as :meth:`Retrieved.to_dict` gives it.

        A replica that dies meanwhile is not a failure: another one is asked. When there is no answer in time, or it
        failed, every answer has status ``error``, the reason in ``error`` and None as ``adapter_version``.

        Args:
            queries: the texts.
            top_k: documents per query, the application's own number by default.

        Raises:
            ValueError: queries or ``top_k`` of another type or range.
        """
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        queries = check_call(queries, 1 if top_k is None else top_k)
        reason = ""
        try:
            async with asyncio.timeout(self.deadline):
                for attempt in range(ATTEMPTS):
                    if attempt:
                        await asyncio.sleep(PAUSE)
                    try:
                        return await self._handle.search.remote(queries, top_k)
                    except RayTaskError as error:  # the replica lives and refused
                        reason = _cause(str(error))
                        break
                    except (RayError, RayServeException) as error:
                        reason = getattr(error, "message", None) or f"{type(error).__name__}: {_cause(str(error))}"
        except TimeoutError:
            reason = f"no answer within {self.deadline:g} s {reason}".strip()
        return [failed_answer(f"retriever {self.name!r}: {reason}") for _ in queries]

    def versions(self, timeout: float = 10.0) -> dict[str, int]:
        """The version that each running replica serves, by replica id; those that do not answer are left out."""
        from ray.serve.exceptions import RayServeException

        try:
            answers = self._handle.broadcast("describe").results(timeout_s=timeout, return_exceptions=True)
        except (RayServeException, TimeoutError):  # no replica runs at the moment
            return {}
        return {answer[0]: answer[1] for answer in answers if isinstance(answer, tuple)}

    def publish(self, adapter: bytes, version: int, timeout: float = 120.0) -> None:
        """Serves a new adapter; when it returns, no search that starts from then on is answered by an older one.

        Replicas take it one by one, so answers of both versions come until then. Publishing the same again is fine.

        Args:
            adapter: the bytes of ``adapter_model.safetensors``.
            version: higher than the one that serves.
            timeout: seconds until all replicas must have it, those that are being restarted too.

        Raises:
            ValueError: the adapter does not fit the encoder, or the version is not newer; nothing changed.
            RuntimeError: not all replicas have it in time. It stays the version to serve: publish it again to go on
                waiting.
        """
        import ray

        deadline = time.monotonic() + timeout
        if not isinstance(adapter, bytes) or type(version) is not int:
            raise ValueError(f"adapter {type(adapter).__name__}, version {version!r}: give bytes and an integer")
        self._try_adapter(adapter, deadline)
        try:
            replicas = ray.get(self._keeper.publish.remote(adapter, version), timeout=timeout)
        except ValueError as error:  # Ray gives errors of the other side the class of their cause as well
            raise ValueError(_cause(str(error)).removeprefix("ValueError: ")) from None
        except ray.exceptions.RayError as error:
            reason = _cause(str(error))
            raise RuntimeError(f"retriever {self.name!r}: the keeper failed ({reason}); stop and start it") from error
        while True:
            # Serve says healthy only when every replica runs and has the newest configuration: none is still starting
            # with an older one. But it says so before it has heard of a new one, so the replicas are asked as well.
            app = _status(self.name)
            part = app.deployments.get(DEPLOYMENT) if app else None
            state = part.status.value if part else "deleted"
            seen = self.versions(min(max(deadline - time.monotonic(), 0.1), 5.0))
            if state == "HEALTHY" and list(seen.values()) == [version] * replicas:
                return
            if state in ("deleted", "DEPLOY_FAILED") or time.monotonic() > deadline:
                raise RuntimeError(
                    f"version {version} is not served by all {replicas} replicas of retriever {self.name!r} within "
                    f"{timeout:.0f} s: versions {seen}, state {state} {_cause(part.message) if part else ''}"
                )
            time.sleep(POLL)

    def _try_adapter(self, adapter: bytes, deadline: float) -> None:
        from ray.exceptions import RayError

        # a replica that cannot load an adapter is restarted by Serve again and again, so one is asked before
        reason: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                response = self._handle.try_adapter.remote(adapter)
                return response.result(timeout_s=max(deadline - time.monotonic(), 0.0))
            except ValueError as error:
                raise ValueError(_cause(str(error)).removeprefix("ValueError: ")) from None
            except (RayError, TimeoutError) as error:
                reason = error
                time.sleep(PAUSE)
        raise RuntimeError(f"no replica of retriever {self.name!r} could look at the adapter: {reason}")

    def stop(self) -> None:
        """Deletes the application and its keeper, and Serve itself when it runs nothing else."""
        _stop(self.name, self._keeper)


def start_serving(
    name: str,
    *,
    replicas: int = 1,
    shards: int = 1,
    num_cpus: float = 0.0,
    threads: int = 1,
    max_batch: int = 32,
    max_wait: float = 0.003,
    timeout: float = 300.0,
    deadline: float = 30.0,
    max_replicas_per_node: int | None = None,
    ray_actor_options: dict[str, Any] | None = None,
    **settings: Any,
) -> ServedRetriever:
    """Starts the application inside the running Ray job and waits until it serves.

    Like every Serve application it outlives the process that started it, so call :meth:`ServedRetriever.stop`. All
    paths are read by replicas and shards, on whatever node they run.

    Args:
        name: of the application, unique in the cluster.
        replicas: copies of the retriever, and of each shard. With one copy searches wait while it is restarted.
        shards: slices of an exact index, each in a process of its own; 1 keeps the index inside the replicas.
        num_cpus: what Ray sets aside for each replica and shard. verl's placement groups usually take all there are,
            so nothing by default; set it where the processes are to have CPUs of their own.
        threads: CPU threads each really uses.
        max_batch: most queries in one encoder batch. A replica takes twice as many calls before others have to wait
            for one that is free: a smaller number spreads a burst more evenly.
        max_wait: seconds a query waits for others to batch with.
        timeout: seconds until all replicas must serve.
        deadline: seconds for a search through what is returned; see :class:`ServedRetriever`.
        max_replicas_per_node: spreads replicas over nodes; 1 puts each on a node of its own.
        ray_actor_options: what else Ray places replicas and shards by: ``num_gpus`` (with ``device='cuda'``),
            ``memory``, ``resources``, ``accelerator_type``, ``label_selector``, ``runtime_env``.
        settings: of :func:`verl_bridge.retrieval.retriever.open_retriever`.

    Raises:
        ValueError: a setting that cannot be, or a name that is taken.
        RuntimeError: Ray is not running, or the application did not come up; names the cause. Nothing is left then.
    """
    import ray

    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r} names no application; give it one")
    counts = {"replicas": replicas, "shards": shards, "threads": threads, "max_batch": max_batch}
    for key, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{key}={value!r} cannot serve; use an integer of at least 1")
    for key, value in {"num_cpus": num_cpus, "max_wait": max_wait}.items():
        if value < 0:
            raise ValueError(f"{key}={value!r} is negative; use 0 or more")
    try:
        inspect.signature(open_retriever).bind(**settings)
    except TypeError as error:
        raise ValueError(f"start_serving: {error}; the settings are those of open_retriever") from None
    if not ray.is_initialized():
        raise RuntimeError("Ray is not running in this process; call ray.init() first")
    options: dict[str, Any] = {"ray_actor_options": {**(ray_actor_options or {}), "num_cpus": num_cpus}}
    if max_replicas_per_node is not None:
        options["max_replicas_per_node"] = max_replicas_per_node
    # paths become plain strings: what Serve stores about an application should not depend on our types
    settings = {key: str(value) if hasattr(value, "__fspath__") else value for key, value in settings.items()}
    shape = {**counts, "max_wait": max_wait, "options": options}
    keeper = _start_keeper(name, settings, shape)
    try:
        ray.get(keeper.deploy.remote(), timeout=timeout)
        _wait_until_running(name, timeout)
        return ServedRetriever(name, keeper, deadline)
    except BaseException as error:
        _stop(name, keeper)
        if isinstance(error, ray.exceptions.RayError):
            raise RuntimeError(f"retriever {name!r} did not start: {_cause(str(error))}") from error
        raise


def get_serving(name: str, deadline: float = 30.0) -> ServedRetriever:
    """The running application of that name, from any process of the cluster.

    Args:
        name: of the application.
        deadline: seconds for a search; see :class:`ServedRetriever`.

    Raises:
        RuntimeError: there is none of that name.
    """
    import ray
    from ray.serve.exceptions import RayServeException

    try:
        return ServedRetriever(name, ray.get_actor(keeper_name(name), namespace=NAMESPACE), deadline)
    except (ValueError, RayServeException):
        raise RuntimeError(f"no retriever {name!r} is served in this Ray cluster; call start_serving first") from None


def stop_serving(name: str) -> None:
    """Deletes what is served under a name, complete or not: for what is left of a process that was killed."""
    import ray

    try:
        keeper = ray.get_actor(keeper_name(name), namespace=NAMESPACE)
    except ValueError:
        keeper = None
    _stop(name, keeper)


def _start_keeper(name: str, settings: dict[str, Any], shape: dict[str, Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    delete = f"from verl_bridge.retrieval.deployment import stop_serving; stop_serving({name!r})"
    taken = ValueError(
        f"a retriever or Serve application {name!r} runs in this Ray cluster; choose another name or, if it is left of "
        f"a run that was killed, delete it: python -c \"import ray; ray.init('auto'); {delete}\""
    )
    if _status(name) is not None:
        raise taken
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    try:
        return (
            ray.remote(ApplicationKeeper)
            .options(
                name=keeper_name(name),
                namespace=NAMESPACE,
                lifetime="detached",  # as Serve's own actors
                num_cpus=0,
                scheduling_strategy=here,
            )
            .remote(name, settings, shape)
        )
    except ValueError:
        raise taken from None


def _status(name: str) -> Any:
    """What Serve says about an application; None when it has none of that name."""
    from ray import serve

    return serve.status().applications.get(name)


def _wait_until_running(name: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        status = _status(name)
        parts = status.deployments if status else {}
        for part, state in parts.items():
            # Serve tries again, but what a replica does not find at its start it will not find later
            if "failed to start" in state.message:
                raise RuntimeError(f"retriever {name!r} did not start: {_cause(state.message)} (in {part})")
        if status and status.status.value == "RUNNING":
            return
        if time.monotonic() > deadline:
            states = {part: {s.value: n for s, n in state.replica_states.items()} for part, state in parts.items()}
            raise RuntimeError(
                f"retriever {name!r} did not start within {timeout:.0f} s: {states}; raise the timeout, or lower "
                "num_cpus where the cluster has no room"
            )
        time.sleep(POLL)


def _stop(name: str, keeper: Any) -> None:
    import ray
    from ray import serve

    if keeper is not None:
        ray.kill(keeper)
    if _status(name) is not None:
        serve.delete(name)
    left = serve.status()
    if not left.applications and not left.proxies:  # with a proxy it would be somebody else's
        serve.shutdown()


def _cause(message: str) -> str:
    """The last line of a traceback that names an exception; Ray and Serve wrap it in their own."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[A-Za-z_.]*(Error|Exception)\b.*: ", line)]
    return (named or lines or [""])[-1]
