"""The retriever as a Ray actor: every rollout worker searches it, the trainer updates it or publishes to it.

Ray starts an actor that died again, from nothing. So everything that changes what is served is given to a keeper, an
actor of its own, before it is acknowledged and before anything is searched with it; a retriever that starts again goes
on from there. When that fails nothing more is searched. Ray is imported only where it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_bridge.retrieval.keeper import keeper_name, start_keeper
from verl_bridge.retrieval.retriever import Call
from verl_bridge.retrieval.service import RetrieverService

logger = logging.getLogger(__name__)

KEEPER_TIMEOUT = 60.0  # seconds for an answer of the keeper, which has nothing to do but to copy some megabytes


class RetrieverLost(RuntimeError):
    """The actor is gone for good: it died more often than it may be started again, or did not come back in time."""


class RetrieverActor(RetrieverService):
    """A :class:`RetrieverService` whose acknowledged state outlives its process.

    Args:
        keeper: the actor name of its :class:`~verl_bridge.retrieval.keeper.Keeper`. What that holds is served from the
            start; with None every start is only from the settings. A name, because Ray may lose a handle by the time
            it starts an actor again.
        settings: of :class:`RetrieverService`.

    Raises:
        RuntimeError: the keeper is lost.
        ValueError: see :class:`RetrieverService`.
    """

    def __init__(self, *, keeper: str | None = None, **settings: Any) -> None:
        import ray

        super().__init__(**settings)
        try:
            self._keeper = None if keeper is None else ray.get_actor(keeper)
        except ValueError as error:
            raise _lost_keeper() from error
        self._done: tuple[str, dict[str, Any]] | None = None
        self._not_kept: Exception | None = None  # why what is loaded may not be searched with
        if keeper is not None:
            self._batcher.call(self._restore)

    async def update(self, batch: Any, name: str = "") -> dict[str, Any]:
        """One update by the learner, once for every name: asked again, the same update gives its result again.

        Args:
            batch: what to learn from.
            name: tells a repetition from another update on the same batch; empty is never a repetition.

        Returns:
            The fields of the learner's result.
        """
        return await self._batcher.run(self._update, batch, name)

    def _update(self, batch: Any, name: str) -> dict[str, Any]:
        if name and self._done is not None and self._done[0] == name:
            return self._done[1]  # the process died between keeping and answering
        result = asdict(super()._changed(self._learner().update, batch))
        self._keep((name, result))
        return result

    def _publish(self, adapter: bytes, version: int, replace: bool) -> None:
        super()._publish(adapter, version, replace)
        self._keep()

    def _changed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = super()._changed(function, *arguments)
        self._keep()
        return result

    # ---- all on the worker thread: what is searched next has been kept ----

    def _search(self, calls: list[Call]) -> list[list[dict[str, Any]]]:
        if self._not_kept is not None:
            raise RuntimeError(f"adapter version {self._retriever.version} is not searched with: {self._not_kept}")
        return super()._search(calls)

    def _keep(self, done: tuple[str, dict[str, Any]] | None = None) -> None:
        if self._keeper is not None:
            queries = self._retriever.encoder.queries
            try:
                state = queries.adapter_bytes() if self._updater is None else self._updater.state_bytes()
                self._ask(self._keeper.keep, self._retriever.version, state, done)
            except Exception as error:
                self._not_kept = error
                raise
        self._done, self._not_kept = done, None

    def _restore(self) -> None:
        version, state = self._ask(self._keeper.current)
        if state is None:  # the first start, or nothing was acknowledged yet
            return
        if self._updater is None:
            super()._publish(state, version, True)
        else:
            self._updater.load_state_bytes(state)
            self._published.clear()
        self._done = self._ask(self._keeper.last_update)
        logger.warning("this retriever was started again; it goes on with adapter version %d", version)

    def _ask(self, method: Any, *arguments: Any) -> Any:
        from ray.exceptions import RayError

        try:
            # ray.get would speak of the actor's event loop
            return method.remote(*arguments).future().result(timeout=KEEPER_TIMEOUT)
        except (RayError, TimeoutError) as error:
            raise _lost_keeper() from error


class StartedRetriever:
    """An actor as the one who started it calls it; made by :func:`start_retriever`. The actor ends with it.

    Args:
        name: the actor's.
        handle: Ray's handle; works on after the actor was started again.
        keeper: handle of its keeper, held here because that actor ends with its last handle.
        restarts: how often Ray starts it again.
        timeout: seconds it may take to load.
    """

    def __init__(self, name: str, handle: Any, keeper: Any, *, restarts: int, timeout: float) -> None:
        self.name, self.handle = name, handle
        self._keeper, self._restarts, self._timeout = keeper, restarts, timeout

    def call(self, method: str, *arguments: Any) -> Any:
        """Waits for a method of :class:`RetrieverActor`. If the actor dies meanwhile, the call is made again once it is
        back: right for whatever may be done twice, and for ``update`` with a name.

        Raises:
            RetrieverLost: it does not come back.
            Exception: what the method raised, as it is.
        """
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

        while True:
            try:
                return ray.get(getattr(self.handle, method).remote(*arguments))
            except RayTaskError as error:  # first: Ray gives it the class of its cause as well
                raise error.cause from error
            except ActorDiedError as error:
                raise RetrieverLost(
                    f"the retriever {self.name!r} died in {method!r} and is not started again: its "
                    f"verl_bridge.retriever.restarts={self._restarts} are used up, or it failed to load "
                    f"({_last_line(error)})"
                ) from error
            except ActorUnavailableError:
                logger.warning("the retriever %r died in %r; waiting until Ray has it back", self.name, method)
                self._await_return(method)

    def _await_return(self, method: str) -> None:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:  # such a call waits in Ray for the actor
            ray.get(self.handle.version.options(max_task_retries=-1).remote(), timeout=self._timeout)
        except GetTimeoutError as error:
            raise RetrieverLost(
                f"the retriever {self.name!r} died in {method!r} and did not come back within {self._timeout:.0f} s; "
                "raise verl_bridge.retriever.load_timeout"
            ) from error
        except RayActorError:
            pass  # the next call says why

    def wait(self) -> None:
        """Returns when it has loaded. Raises RuntimeError with the cause when it cannot, or not in time."""
        import ray

        try:
            ray.get(self.handle.version.remote(), timeout=self._timeout)
        except ray.exceptions.GetTimeoutError as error:
            raise RuntimeError(
                f"retriever {self.name!r} did not load within {self._timeout:.0f} s; raise "
                "verl_bridge.retriever.load_timeout, or lower its num_gpus or num_cpus where the cluster has no room"
            ) from error
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"retriever {self.name!r} did not start: {_last_line(error)}") from error


def start_retriever(
    name: str,
    *,
    corpus: str,
    index: str,
    encoder: str | None = None,
    timeout: float = 300.0,
    restarts: int = 0,
    num_cpus: float = 0.0,
    num_gpus: float = 0.0,
    wait: bool = True,
    **settings: Any,
) -> StartedRetriever:
    """Starts the named actor and waits until it serves; the actor ends with what is returned.

    Args:
        name: the actor's name in this job's namespace.
        corpus, index, encoder: see :class:`RetrieverService`.
        timeout: seconds to wait for the models to load.
        restarts: how often Ray starts it again after it died.
        num_cpus, num_gpus: what Ray reserves for it. verl's placement groups usually take all CPUs there are.
        wait: False returns at once; call :meth:`StartedRetriever.wait` before anything else.
        settings: the other settings of :class:`RetrieverService`.

    Raises:
        ValueError: a setting or path that is missing (checked before an actor starts), or the name is taken.
        RuntimeError: the actor could not load; the cause is in the message.
    """
    import ray

    for key, value in (("corpus", corpus), ("index", index)):
        if not value:
            raise ValueError(f"verl_bridge.retriever.{key}={value!r} is not set; give the {key} to use")
        if not Path(value).exists():
            raise ValueError(f"verl_bridge.retriever.{key}={value!r} does not exist; give the path of the {key}")
    try:
        keeper = start_keeper(name) if restarts else None
        handle = (
            ray.remote(RetrieverActor)
            .options(name=name, num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=restarts)
            .remote(
                keeper=keeper_name(name) if restarts else None, corpus=corpus, index=index, encoder=encoder, **settings
            )
        )
    except ValueError as error:
        raise ValueError(
            f"verl_bridge.retriever.actor_name={name!r} is taken in this Ray job ({error}); choose another name"
        ) from error
    started = StartedRetriever(name, handle, keeper, restarts=restarts, timeout=timeout)
    if wait:
        started.wait()
    return started


def get_retriever(name: str) -> Any:
    """The running actor of this job. Raises RuntimeError that names the key and the fix when there is none."""
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        raise RuntimeError(
            f"no retriever actor named verl_bridge.retriever.actor_name={name!r} in this Ray job; the trainer "
            "(trainer.v1.trainer_mode=bridge_sync) starts it, or call start_retriever first and keep what it returns"
        ) from None


def _lost_keeper() -> RuntimeError:
    return RuntimeError(
        "the keeper of the retriever's state is lost or hangs, so nothing can be acknowledged; resume the run from its "
        "last checkpoint"
    )


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]  # the rest is the actor's traceback
