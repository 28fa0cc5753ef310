"""What a retriever has acknowledged, kept in a process of its own, so that the retriever's may die.

The keeper is a Ray actor that holds one number, some megabytes of bytes and one small answer: there is nothing in it
that fails with a model. It is not started again: without it a retriever refuses to start, better none than a stale one.
"""

from __future__ import annotations

from typing import Any


class Keeper:
    """The state that was acknowledged last; calls are done in turn, each whole or not at all."""

    def __init__(self) -> None:
        self._version: int = 0
        self._state: bytes | None = None
        self._done: tuple[str, dict[str, Any]] | None = None

    def keep(self, version: int, state: bytes, done: tuple[str, dict[str, Any]] | None = None) -> None:
        """Takes the place of what was kept before.

        Args:
            version: the adapter version.
            state: everything needed to go on from there: a learner's state, or where nobody learns the adapter's bytes.
            done: the name of the update that led there and its result, for whoever asks for that update again.
        """
        self._version, self._state, self._done = version, state, done

    def current(self) -> tuple[int, bytes | None]:
        """Version and state; version 0 without a state where nothing was acknowledged yet."""
        return self._version, self._state

    def last_update(self) -> tuple[str, dict[str, Any]] | None:
        """The update that led to the current state, None when it was none."""
        return self._done


def keeper_name(name: str) -> str:
    """The Ray actor name of a retriever's keeper, in the retriever's namespace."""
    return f"{name}_keeper"


def start_keeper(name: str) -> Any:
    """Starts the keeper of the retriever ``name`` on this node; keep the handle, the actor ends with it.

    Raises:
        ValueError: it has one.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(Keeper).options(name=keeper_name(name), num_cpus=0, scheduling_strategy=here).remote()
