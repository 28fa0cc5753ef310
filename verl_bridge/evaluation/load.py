"""A closed-loop load on an HTTP server: so many clients, each with one request at a time."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One answered request.

    Args:
        request: position of its body among the bodies.
        status: HTTP status; 0 when the connection failed.
        start, end: seconds on the machine's monotonic clock, the same for every process.
        body: what came back.
    """

    request: int
    status: int
    start: float
    end: float
    body: bytes


@dataclass(frozen=True)
class Load:
    """What a load gave: the answers in order of their end, and the seconds it took."""

    seconds: float
    answers: list[Answer] = field(repr=False)

    @property
    def failed(self) -> int:
        """Requests that did not get status 200."""
        return sum(answer.status != 200 for answer in self.answers)

    def summary(self) -> dict[str, float]:
        """Requests per second, latency percentiles in ms, failed requests."""
        milliseconds = [1000 * (answer.end - answer.start) for answer in self.answers]
        cuts = statistics.quantiles(milliseconds, n=100, method="inclusive")
        return {
            "requests_per_second": len(self.answers) / self.seconds,
            "p50_ms": cuts[49],
            "p95_ms": cuts[94],
            "p99_ms": cuts[98],
            "requests": len(self.answers),
            "failed": self.failed,
        }


async def _drive(url: str, bodies: Sequence[bytes], requests: int, clients: int, keep_bodies: bool) -> Load:
    import aiohttp

    answers: list[Answer] = []
    numbers = iter(range(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:  # shared: whoever is free takes the next
            which, start, status, body = number % len(bodies), time.monotonic(), 0, b""
            try:
                async with session.post(url, data=bodies[which]) as response:
                    body, status = await response.read(), response.status
            except aiohttp.ClientError as error:
                body = str(error).encode()
            answers.append(Answer(which, status, start, time.monotonic(), body if keep_bodies else b""))

    connector = aiohttp.TCPConnector(limit=0)
    headers, timeout = {"Content-Type": "application/json"}, aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
        start = time.monotonic()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        return Load(time.monotonic() - start, answers)


def _in_process(*arguments: Any) -> Load:
    return asyncio.run(_drive(*arguments))


def drive(
    url: str,
    bodies: Sequence[bytes],
    *,
    requests: int,
    clients: int,
    keep_bodies: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> Load:
    """Posts the bodies in turn until ``requests`` are answered, from a process of its own.

    Args:
        url: where to post.
        bodies: JSON bodies, repeated in order.
        requests: how many in all.
        clients: connections, each waits for its answer before it asks again.
        keep_bodies: keep the answers' bodies; otherwise they are dropped.
        meanwhile: called in this process while the load runs.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        running = pool.submit(_in_process, url, list(bodies), requests, clients, keep_bodies)
        if meanwhile is not None:
            meanwhile()
        return running.result()
