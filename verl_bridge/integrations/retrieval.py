"""The trainer's side of the retriever: who serves, who learns, and how an adapter gets from one to the other.

One of three serves: an actor of the job (the default), Ray Serve (``replicas`` or ``shards``), servers behind ``url``.
With BRIDGE somebody learns: the serving actor itself (``bridge.worker=shared``), or a learner of its own. Whoever else
serves is then given every adapter it makes, and takes it on before anything is searched again. What died is waited for,
as often as ``retriever.restarts`` says.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.updater import UpdateResult
from verl_bridge.config.schema import RetrieverConfig
from verl_bridge.integrations.sources import ActorSource, make_client
from verl_bridge.qa.answers import alias_hit
from verl_bridge.retrieval.actor import RetrieverLost, StartedRetriever, start_retriever
from verl_bridge.retrieval.client import split_urls

Probe = Sequence[tuple[str, Sequence[str]]]

#: Searched here and at the servers when a run starts; they need no answer, only the same one.
COMPARED = ("capital of a country", "who wrote the book", "year of birth", "a river that runs through the town")
#: Largest mean difference of their scores where those are cosines; rounding to bfloat16 stays within a third of it.
TOLERANCE = 0.01
AT_ONCE = 64  # queries of a probe in one request


def retriever_files(settings: RetrieverConfig) -> dict[str, Any]:
    """The settings as keywords of ``open_retriever``, but for the seed."""
    names = "corpus index encoder family revision query_prefix passage_prefix pooling normalize max_length".split()
    names += "lora_rank top_k compute_dtype search_dtype device".split()
    return {name: getattr(settings, name) for name in names}


class TrainerRetrieval:
    """What the trainer starts, trains and publishes. Not for event loops: every call waits.

    Args:
        settings: the retriever's.
        seed: of the adapter's start.
        updater: makes the learner from (query encoder, index); None trains no adapter.
        worker: ``shared``: the actor that serves learns too; ``own``: a learner of its own, as always where Ray Serve
            or servers behind ``url`` answer the searches.
        device, num_gpus, num_cpus: a learner's own place; None is the device of ``settings``.

    Raises:
        ValueError: a file or setting that is missing, or a name that is taken.
        RuntimeError: something did not start, or the servers behind ``url`` refuse the adapter or find other things.
    """

    def __init__(
        self,
        settings: RetrieverConfig,
        *,
        seed: int,
        updater: Callable[[Any, Any], Any] | None,
        worker: str = "shared",
        device: str | None = None,
        num_gpus: float = 0.0,
        num_cpus: float = 0.0,
    ) -> None:
        self.settings = settings
        self._learner: StartedRetriever | None = None
        self._server: StartedRetriever | None = None  # an actor of the job
        self._serving: Any = None  # Ray Serve
        self._version: int | None = None  # served by everybody; None where it is not ours to say
        self._checkpoint = "the last checkpoint"  # to resume from
        opened = {**retriever_files(settings), "seed": seed, "threads": settings.threads}
        name, timeout = settings.actor_name, settings.load_timeout
        actor = {"timeout": timeout, "restarts": settings.restarts, "wait": False}
        served_here = not (settings.url or settings.spread)
        if served_here:
            learns = updater if worker == "shared" else None
            self._server = start_retriever(name, updater=learns, num_gpus=settings.num_gpus, **actor, **opened)
        if updater is not None and served_here and worker == "shared":
            self._learner = self._server
        elif updater is not None:
            place = {"device": device or settings.device}
            self._learner = start_retriever(  # it needs only the vectors
                f"{name}_learner",
                updater=updater,
                searchable=False,
                num_gpus=num_gpus,
                num_cpus=num_cpus,
                **actor,
                **{**opened, **place},
            )
        for started in (self._server, self._learner):
            if started is not None:
                started.wait()
        if settings.spread:
            self._serving = self._serve(opened)
        try:
            self.publish(begin=True)
            if self._learner is not None and settings.url is not None:
                self._compare()
        except BaseException:
            self.stop()
            raise

    def _serve(self, opened: dict[str, Any]) -> Any:
        from verl_bridge.retrieval.deployment import start_serving

        settings = self.settings
        place = {"ray_actor_options": {"num_gpus": settings.num_gpus}} if settings.num_gpus else {}
        shape = {"replicas": settings.replicas, "shards": settings.shards}
        times = {"timeout": settings.load_timeout, "deadline": settings.deadline}
        try:
            return start_serving(settings.actor_name, **shape, **times, **place, **opened)
        except ValueError as error:
            raise ValueError(f"verl_bridge.retriever.actor_name={settings.actor_name!r}: {error}") from error

    @property
    def publishes(self) -> bool:
        """Whether somebody else serves what the learner makes."""
        return self._learner is not None and self._learner is not self._server

    # ---- learning ---------------------------------------------------------------------------------------------

    def update(self, batch: RetrieverBatch) -> UpdateResult:
        """One update of the retriever; when it returns, everybody serves the new version.

        A learner that dies in it begins the same update again once it is back, as if it had not begun.

        Returns:
            The learner's result; among its metrics ``bridge/publish_seconds`` where somebody else serves.

        Raises:
            RuntimeError: the learner is lost, its update failed, or somebody did not take the version on: the run has
                to stop.
            ValueError, KeyError: the batch cannot be learnt from; nothing changed.
        """
        try:
            result = UpdateResult(**self._ask("update", batch, uuid.uuid4().hex))
        except (RetrieverLost, ValueError, KeyError):  # they say what to do
            raise
        except Exception as error:  # such as no memory left
            kind = type(error).__name__
            raise RuntimeError(f"the retriever's update failed: {kind}: {error}; {self._last_good()}") from error
        if not self.publishes:
            self._version = result.version
            return result
        started = time.perf_counter()
        self.publish()
        return replace(result, metrics={**result.metrics, "bridge/publish_seconds": time.perf_counter() - started})

    def known_versions(self) -> set[int]:
        """The adapter versions that a turn to learn from may have been served by."""
        return set(self._ask("known_versions"))

    def documents(self, ids: Sequence[str]) -> list[dict[str, str]]:
        """The documents with these ids as ``{id, title, text}``. Raises KeyError for an unknown id."""
        return self._ask("documents", ids)

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the learner's checkpoint; it appears when complete. Raises RuntimeError when it cannot be written."""
        self._write("save", directory)
        self._checkpoint = str(directory)

    def save_adapter(self, directory: str | os.PathLike) -> None:
        """Writes only the learner's adapter, in PEFT's format. Raises RuntimeError when it cannot be written."""
        self._write("save_adapter", directory)

    def _write(self, method: str, directory: str | os.PathLike) -> None:
        try:
            self._ask(method, str(directory))
        except RetrieverLost:
            raise
        except Exception as error:  # no space is an OSError here and an error of its own in safetensors
            raise RuntimeError(f"{directory} was not written: {error}; resume from {self._checkpoint}") from error

    def load(self, directory: str | os.PathLike) -> None:
        """Continues from a learner's checkpoint, and publishes its adapter.

        Raises:
            ValueError: there is none, it is damaged or does not fit; what served before serves on.
            RuntimeError: the learner is lost, or somebody did not take the adapter on.
        """
        self._ask("load", str(directory))
        self._checkpoint = str(directory)
        self.publish(begin=True)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """A method of the learner's actor. Raises RuntimeError when it is lost, else what the method raises."""
        assert self._learner is not None, f"{method} without a learner (verl_bridge.bridge.enable=false)"
        try:
            return self._learner.call(method, *arguments)
        except RetrieverLost as error:
            raise RetrieverLost(f"{error}; {self._last_good()}") from error

    def _last_good(self) -> str:
        return f"adapter version {self._version} is the last good one: resume from {self._checkpoint}"

    def publish(self, *, begin: bool = False) -> None:
        """Gives the learner's adapter to whoever else serves, and returns when all of them serve it.

        Args:
            begin: at the start and after a resume, when a server may hold another run's adapter under this version.

        Raises:
            RuntimeError: somebody did not take it on: what they answer from now on would be of another version.
        """
        if self._learner is None:
            return
        if not self.publishes:
            self._version = self._ask("version")
            return
        version, adapter = self._ask("adapter_bytes")
        try:
            if self._server is not None:
                self._server.call("publish", adapter, version, begin)
            elif self._serving is None:
                asyncio.run(self._to_servers(adapter, version, begin))
            elif version > 0:  # replicas start from the same seed, so version 0 is theirs already
                # one that died has to load again first
                self._serving.publish(adapter, version, timeout=self.settings.load_timeout)
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"adapter version {version} is not served by all of {self._who()}: {error}; the run stops here, since "
                "searches would be answered by another adapter: repair this, then start or resume it again"
            ) from error
        self._version = version

    async def _to_servers(self, adapter: bytes, version: int, begin: bool) -> None:
        async with make_client(self.settings) as client:
            await client.publish(adapter, version, replace=begin)

    def check_served(self, versions: Iterable[int], *, older: bool = False) -> None:
        """Raises RuntimeError unless rollouts were answered by the version that everybody serves.

        Args:
            versions: of the searches that were answered.
            older: whether versions before it are right, too: for asynchronous training.
        """
        if self._version is None:
            return
        others = sorted(v for v in set(versions) if v > self._version or (v < self._version and not older))
        if others:
            raise RuntimeError(
                f"searches were answered by adapter version {', '.join(map(str, others))}, but {self._version} was "
                f"published to {self._who()}: one was restarted, or somebody else publishes there; the run stops here. "
                f"Resume from {self._checkpoint} to publish again"
            )

    # ---- searching --------------------------------------------------------------------------------------------

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
        source = client or self._serving or ActorSource(self.settings.actor_name, self.settings.deadline)
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
            (ours,) = self._ask("scores", [query], [theirs["ids"]])
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
