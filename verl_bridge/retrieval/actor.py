"""The retriever as one Ray actor: every rollout worker searches it, the trainer updates it.

Ray is imported only where it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_bridge.retrieval.service import RetrieverService


def start_retriever(
    name: str, *, corpus: str, index: str, encoder: str | None = None, timeout: float = 300.0, **settings: Any
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

    for key, value in (("corpus", corpus), ("index", index)):
        if not value:
            raise ValueError(f"verl_bridge.retriever.{key}={value!r} is not set; give the {key} to use")
        if not Path(value).exists():
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
