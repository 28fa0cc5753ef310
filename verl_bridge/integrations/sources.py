"""Whom a rollout asks, by the settings: an actor of the job, Ray Serve, or servers behind ``url``."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from ray.exceptions import RayActorError

from verl_bridge.config.schema import ConfigError, RetrieverConfig
from verl_bridge.retrieval.actor import get_retriever
from verl_bridge.retrieval.client import RetrievalClient
from verl_bridge.retrieval.corpus import Document
from verl_bridge.retrieval.retriever import search_text
from verl_bridge.retrieval.wire import failed_answer

logger = logging.getLogger(__name__)


class SearchSource(Protocol):
    """What answers searches, whoever it is."""

    async def search(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """One answer per query, the dictionaries of ``Retrieved.to_dict``."""


class ActorSource:
    """The job's retriever actor.

    Args:
        name: the actor's.
        deadline: seconds in which an actor that died has to be back.

    Raises:
        RuntimeError: there is none of that name.
    """

    def __init__(self, name: str, deadline: float) -> None:
        self._name, self._actor, self.deadline = name, get_retriever(name), deadline

    async def search(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """See :class:`SearchSource`.

        An actor that dies meanwhile is asked again once Ray has started it again. When it is not back in time, every
        answer has status ``error``, the reason in ``error`` and None as ``adapter_version``.

        Raises:
            RayError: the search itself failed.
        """
        try:
            return await self._actor.search.remote(queries, top_k)
        except RayActorError:
            pass
        try:
            async with asyncio.timeout(self.deadline):  # Ray keeps such a call until the actor is back
                return await self._actor.search.options(max_task_retries=-1).remote(queries, top_k)
        except (RayActorError, TimeoutError) as error:
            gone = isinstance(error, RayActorError)
            reason = "it is not started again" if gone else f"it was not back within {self.deadline:g} s"
        return [failed_answer(f"the retriever {self._name!r} died and {reason}") for _ in queries]


@lru_cache
def search_source(settings: RetrieverConfig) -> SearchSource:
    """What serves under these settings, looked up once per process: verl makes a loop object per rollout.

    Raises:
        RuntimeError: it was not started.
        ConfigError: an address or a token that cannot be used.
    """
    if settings.url is not None:
        return make_client(settings)
    if settings.spread:
        from verl_bridge.retrieval.deployment import get_serving

        return get_serving(settings.actor_name, settings.deadline)
    return ActorSource(settings.actor_name, settings.deadline)


def make_client(settings: RetrieverConfig, **changes: Any) -> RetrievalClient:
    """A client of the servers behind ``url``. Raises ConfigError that names the key."""
    token = os.environ.get(settings.token_env)
    try:
        return RetrievalClient(settings.url, **{"token": token or None, "deadline": settings.deadline, **changes})
    except ValueError as error:
        raise ConfigError(
            f"verl_bridge.retriever.url={settings.url!r} with the token in {settings.token_env}: {error}"
        ) from None


async def ask(
    settings: RetrieverConfig, query: str, question: str, source: Callable[[RetrieverConfig], SearchSource]
) -> tuple[dict[str, Any], list[Document]]:
    """One search of a rollout: the retrieval fields of the turn's record, and the documents to show.

    A retrieval that fails is a record with status ``error``, never an exception: verl would drop the prompt and train
    on. That all searches of a step failed is for the trainer to see.
    """
    try:
        (found,) = await source(settings).search([search_text(query, question, settings.query_input)], settings.top_k)
        failure = found["error"]
    except Exception as error:
        failure = repr(error)
    if failure is not None:
        logger.warning("the retrieval for %r failed: %s", query[:200], failure)
        return {"query": query, "status": "error"}, []
    documents = [Document(**document) for document in found["documents"][: settings.shown]]
    record = {"query": query, "status": "ok", "adapter_version": found["adapter_version"]}
    if documents:
        record |= {"candidate_ids": tuple(found["ids"]), "candidate_scores": tuple(found["scores"])}
        record["shown"] = len(documents)
    return record, documents
