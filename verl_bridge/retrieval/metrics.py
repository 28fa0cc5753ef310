"""What the server counts, in Prometheus' text form."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


class ServerMetrics:
    """The counters of one application, in a registry of its own, so that two in a process do not mix.

    Args:
        paths: the endpoints that are counted by name; everything else counts as ``other``.
        queued: gives the queries that wait.
        version: gives the adapter version that serves.
    """

    def __init__(self, paths: set[str], queued: Callable[[], int], version: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._paths = paths

        def made(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            return kind(f"verl_bridge_{name}", text, labels, registry=self.registry, **more)

        self._requests = made(Counter, "requests", "Requests by endpoint and HTTP status.", ("endpoint", "status"))
        self._seconds = made(
            Histogram, "request_seconds", "Seconds from request to answer.", ("endpoint",), buckets=_SECONDS
        )
        self.batch = made(Histogram, "batch_queries", "Queries in one encoder batch.", buckets=_QUERIES)
        self.failed = made(Counter, "failed_queries", "Queries without an answer, blank ones among them.")
        made(Gauge, "queue_queries", "Queries that wait.").set_function(queued)
        made(Gauge, "adapter_version", "Version of the adapter that serves.").set_function(version)

    def text(self) -> bytes:
        """All values as Prometheus reads them."""
        return generate_latest(self.registry)

    def count(self, path: str, status: int, started: float) -> None:
        """One request that was answered; ``started`` is of ``time.perf_counter``."""
        endpoint = path if path in self._paths else "other"
        self._requests.labels(endpoint, status).inc()
        self._seconds.labels(endpoint).observe(time.perf_counter() - started)
