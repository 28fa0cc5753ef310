"""Where rollouts search, and how an adapter that was learnt gets there.

One of three serves: an actor of the job (the default), Ray Serve (``replicas`` or ``shards``), servers behind ``url``.
With BRIDGE the actor is always there, because it learns; whoever else serves is given every adapter it makes, and takes
it on before anything is searched again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import ray

from verl_bridge.config.schema import ConfigError, RetrieverConfig
from verl_bridge.qa.answers import alias_hit
from verl_bridge.retrieval.actor import get_retriever, start_retriever
from verl_bridge.retrieval.client import RetrievalClient, split_urls

Probe = Sequence[tuple[str, Sequence[str]]]

#: Searched here and at the servers when a run starts; they need no answer, only the same one.
COMPARED = ("capital of a country", "who wrote the book", "year of birth", "a river that runs through the town")
#: Largest mean difference of their scores where those are cosines; rounding to bfloat16 stays within a third of it.
TOLERANCE = 0.01
AT_ONCE = 64  # queries of a probe in one request


class SearchSource(Protocol):
    """What answers searches, whoever it is."""

    async def search(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """One answer per query, the dictionaries of ``Retrieved.to_dict``."""


class ActorSource:
    """The job's retriever actor. Raises RuntimeError when there is none."""

    def __init__(self, name: str) -> None:
        self._actor = get_retriever(name)

    async def search(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """See :class:`SearchSource`. Raises RayError when the actor is gone or failed."""
        return await self._actor.search.remote(queries, top_k)


@lru_cache
def search_source(settings: RetrieverConfig) -> SearchSource:
    """What serves under these settings, looked up once a process: verl makes a loop object per rollout.

    Raises:
        RuntimeError: it was not started.
        ConfigError: an address or a token that cannot be used.
    """
    if settings.url is not None:
        return make_client(settings)
    if settings.spread:
        from verl_bridge.retrieval.deployment import get_serving

        return get_serving(settings.actor_name)
    return ActorSource(settings.actor_name)


def make_client(settings: RetrieverConfig, **changes: Any) -> RetrievalClient:
    """A client of the servers behind ``url``. Raises ConfigError that names the key."""
    token = os.environ.get(settings.token_env)
    try:
        return RetrievalClient(settings.url, **{"token": token or None, "deadline": settings.deadline, **changes})
    except ValueError as error:
        raise ConfigError(
            f"verl_bridge.retriever.url={settings.url!r} with the token in {settings.token_env}: {error}"
        ) from None


def retriever_files(settings: RetrieverConfig) -> dict[str, Any]:
    """The settings as keywords of ``open_retriever``, but for the seed."""
    names = "corpus index encoder family revision query_prefix passage_prefix pooling normalize max_length".split()
    names += "lora_rank top_k compute_dtype search_dtype".split()
    return {name: getattr(settings, name) for name in names}


class TrainerRetrieval:
    """What the trainer starts, trains and publishes.

    Args:
        settings: the retriever's.
        seed: of the adapter's start.
        updater: makes the learner from (query encoder, index); None trains no adapter.

    Raises:
        ValueError: a file or setting that is missing, or a name that is taken.
        RuntimeError: something did not start, or the servers behind ``url`` refuse the adapter or find other things.
    """

    def __init__(self, settings: RetrieverConfig, *, seed: int, updater: Callable[[Any, Any], Any] | None) -> None:
        self.settings, self.actor, self._serving = settings, None, None
        self._version: int | None = None  # the last one published
        opened = {**retriever_files(settings), "seed": seed, "threads": settings.threads}
        name, timeout = settings.actor_name, settings.load_timeout
        if updater is not None or not (settings.url or settings.spread):
            # where others answer the searches, the learner needs the vectors alone
            served_here = not (settings.url or settings.spread)
            self.actor = start_retriever(name, updater=updater, timeout=timeout, searchable=served_here, **opened)
        self._publishes = updater is not None and (settings.spread or settings.url is not None)
        if settings.spread:
            from verl_bridge.retrieval.deployment import start_serving

            try:
                self._serving = start_serving(
                    name, replicas=settings.replicas, shards=settings.shards, timeout=timeout, **opened
                )
            except ValueError as error:
                raise ValueError(f"verl_bridge.retriever.actor_name={name!r}: {error}") from error
        try:
            self.publish(begin=True)
            if self._publishes and settings.url is not None:
                self._compare()
        except BaseException:
            self.stop()
            raise

    @property
    def publishes(self) -> bool:
        """Whether somebody else serves what the actor learns."""
        return self._publishes

    def publish(self, *, begin: bool = False) -> None:
        """Gives the learner's adapter to whoever else serves, and returns when all of them serve it.

        Args:
            begin: at the start and after a resume, when a server may hold another run's adapter under this version.

        Raises:
            RuntimeError: somebody did not take it on: what they answer from now on would be of another version.
        """
        if not self._publishes:
            return
        version, adapter = ray.get(self.actor.adapter_bytes.remote())
        try:
            if self._serving is None:
                asyncio.run(self._to_servers(adapter, version, begin))
            elif version > 0:  # replicas start from the same seed, so version 0 is theirs already
                self._serving.publish(adapter, version)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"adapter version {version} is not served by all of {self._who()}: {error}; the run stops here, since "
                "searches would be answered by another adapter: repair this, then start or resume it again"
            ) from error
        self._version = version

    async def _to_servers(self, adapter: bytes, version: int, begin: bool) -> None:
        async with make_client(self.settings) as client:
            await client.publish(adapter, version, replace=begin)

    def check_served(self, versions: Iterable[int]) -> None:
        """Raises RuntimeError unless rollouts were all answered by the version that was published last."""
        others = sorted(set(versions) - {self._version})
        if self._publishes and others:
            raise RuntimeError(
                f"searches were answered by adapter version {', '.join(map(str, others))}, but {self._version} was "
                f"published to {self._who()}: one was restarted, or somebody else publishes there; the run stops here, "
                "resume it from the last checkpoint to publish again"
            )

    def search(self, queries: Sequence[str], top_k: int) -> list[dict[str, Any]]:
        """Answers of whoever serves; a failed search is an answer with status ``error`` and no documents."""
        return asyncio.run(self._search(queries, top_k=top_k)) if queries else []

    def recall(self, probe: Probe, shown: int) -> dict[str, float]:
        """Shares of a fixed probe set whose passages hold a gold alias, asked of whoever serves.

        Args:
            probe: (query, golden answers) pairs, at least one.
            shown: passages the model would see.

        Returns:
            ``recall_shown``, ``recall_top_k`` and ``failed`` as shares, ``n`` and ``adapter_version``.

        Raises:
            RuntimeError: every search failed.
        """
        answers = asyncio.run(self._search([query for query, _ in probe]))
        served = [answer for answer in answers if answer["status"] == "ok"]
        if not served:
            raise RuntimeError(f"every search of the recall probe failed at {self._who()}: {answers[0]['error']}")
        within_shown = within_all = 0
        for (_, golds), answer in zip(probe, answers, strict=True):
            hits = [alias_hit(f"{document['title']} {document['text']}", golds) for document in answer["documents"]]
            within_shown += any(hits[:shown])
            within_all += any(hits)
        return {
            "recall_shown": within_shown / len(probe),
            "recall_top_k": within_all / len(probe),
            "failed": 1 - len(served) / len(probe),
            "n": float(len(probe)),
            "adapter_version": float(served[0]["adapter_version"]),
        }

    async def _search(
        self, queries: Sequence[str], url: str | None = None, top_k: int | None = None
    ) -> list[dict[str, Any]]:
        """Answers from whoever serves, or from the one server at ``url``."""
        url = url or self.settings.url
        client = None if url is None else make_client(replace(self.settings, url=url))
        source = client or self._serving or ActorSource(self.settings.actor_name)
        answers: list[dict[str, Any]] = []
        try:
            for start in range(0, len(queries), AT_ONCE):
                answers += await source.search(queries[start : start + AT_ONCE], top_k or self.settings.top_k)
        finally:
            if client is not None:
                await client.close()
        return answers

    def _compare(self) -> None:
        """Raises RuntimeError unless servers and learner score alike: BRIDGE's ratios build on that."""
        for url in split_urls(self.settings.url):
            there = asyncio.run(self._search(COMPARED, url))
            for query, theirs in zip(COMPARED, there, strict=True):
                if (error := theirs["error"] or self._difference(query, theirs)) is not None:
                    raise RuntimeError(
                        f"the server {url} and the learner disagree on {query!r}: {error}; serve the corpus, index, "
                        "encoder and query prefix that verl_bridge.retriever names"
                    )

    def _difference(self, query: str, theirs: dict[str, Any]) -> str | None:
        """How a server's answer differs from the learner's scores beyond rounding; None when it does not."""
        if not theirs["ids"]:
            return "it finds nothing"
        try:
            (ours,) = ray.get(self.actor.scores.remote([query], [theirs["ids"]]))
        except KeyError:
            return f"it finds {theirs['ids'][:3]}, not all of which are in the learner's corpus"
        scale = max(1.0, *map(abs, ours))
        if sum(abs(a - b) for a, b in zip(ours, theirs["scores"], strict=True)) > TOLERANCE * scale * len(ours):
            return f"it scores {theirs['scores'][:3]}, the learner {[round(score, 3) for score in ours[:3]]}"
        return None

    def _who(self) -> str:
        if self.settings.url is not None:
            return f"verl_bridge.retriever.url={self.settings.url!r}"
        if self.settings.spread:
            return f"the {self.settings.replicas} replicas of {self.settings.actor_name!r}"
        return f"the actor {self.settings.actor_name!r}"

    def stop(self) -> None:
        """Ends what would outlive the job: Ray Serve's applications do."""
        if self._serving is not None:
            self._serving.stop()
            self._serving = None
