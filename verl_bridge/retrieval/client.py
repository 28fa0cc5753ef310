"""Searches one or more ``verl-bridge serve`` over HTTP and publishes adapters to them.

A search never raises for the network: a server that is down, slow, busy or broken gives answers with status ``error``
and the reason, which a loop can tell from "nothing found". Nothing received is trusted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verl_bridge.retrieval.retriever import check_call
from verl_bridge.retrieval.wire import (
    LONGEST_WAIT,
    failed_answer,
    one_line,
    read_health,
    read_reason,
    read_results,
    read_retry_after,
    read_version,
)

if TYPE_CHECKING:
    import aiohttp

RETRIED = (429, 502, 503, 504)
REST = 5.0  # seconds that a replica is passed over after a failure
POLL = 0.05  # seconds between two looks at whether a server has taken a version on


class _Trouble(Exception):
    """A request that failed, with its reason; ``status`` is 0 where no answer came."""

    def __init__(self, reason: str, *, status: int = 0, again: bool = False, wait: float | None = None) -> None:
        super().__init__(reason)
        self.status, self.again, self.wait = status, again, wait


def split_urls(url: str | Sequence[str]) -> list[str]:
    """Server addresses from a list or a comma-separated string, without closing slashes.

    Raises:
        ValueError: none is given, or one is not ``http[s]://HOST[:PORT][/PATH]``.
    """
    urls = [part.strip().rstrip("/") for part in (url.split(",") if isinstance(url, str) else url)]
    for part in urls:
        try:
            split = urlsplit(part)
            good = split.scheme in ("http", "https") and split.hostname and (split.port is None or split.port > 0)
        except ValueError:  # not a port, or not an IPv6 address
            good = False
        if not good or split.query or split.fragment or "@" in split.netloc or not part.isprintable() or " " in part:
            raise ValueError(f"invalid server address {part!r}: use http://HOST:PORT (comma-separated for several)")
    if not urls:
        raise ValueError("no server address: use http://HOST:PORT")
    return list(dict.fromkeys(urls))


class RetrievalClient:
    """An asynchronous client; usable from any event loop, with one pool of connections for each.

    Searches go round the servers in turn. One that fails is passed over for a while, and a request that failed goes to
    another one at once; where there is none it waits with exponential back-off and full jitter, or as long as the
    server asks in ``Retry-After`` (at most 10 s). Retried are connection errors, timeouts and HTTP 429, 502, 503, 504.

    Args:
        url: address of a server, or of several: a list, or comma-separated.
        token: bearer token.
        deadline: seconds for a whole call, its retries included. An attempt gets half of what is left, the last all.
        attempts: most requests of one search. Publishing goes on until the deadline.
        backoff: seconds of the first pause at most; it doubles.
        max_answer: largest answer in bytes.

    Raises:
        ValueError: an address, token or number that cannot be used.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        token: str | None = None,
        deadline: float = 30.0,
        attempts: int = 5,
        backoff: float = 0.5,
        max_answer: int = 64 * 2**20,
    ) -> None:
        self.urls = split_urls(url)
        if token is not None and not (token.strip() == token != "" and token.isascii() and token.isprintable()):
            raise ValueError("the bearer token is blank or holds more than printable ASCII; give another one")
        if not (isfinite(deadline) and deadline > 0) or attempts < 1 or backoff < 0:
            raise ValueError(f"deadline={deadline}, attempts={attempts}, backoff={backoff}; use positive numbers")
        self.deadline, self.attempts, self.backoff, self.max_answer = deadline, attempts, backoff, max_answer
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._turn = 0
        self._resting: dict[str, float] = {}  # address → until when, in time.monotonic()
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    # ---- what it does -----------------------------------------------------------------------------------------

    async def search(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """One answer per query, the dictionaries of ``Retrieved.to_dict``; top_k None leaves it to the server.

        Where a server did not answer, or not with what was asked for, every answer has status ``error``, the reason in
        ``error`` and None as ``adapter_version``.

        Raises:
            ValueError: queries or ``top_k`` of another type or range.
        """
        import orjson

        queries = check_call(queries, 1 if top_k is None else top_k)
        if not queries:
            return []
        body = orjson.dumps({"queries": queries, "top_k": top_k})
        try:
            return await self._ask(
                self.urls,
                lambda answer: read_results(answer, len(queries), top_k),
                "POST",
                "/search",
                attempts=self.attempts,
                data=body,
                headers={"Content-Type": "application/json"},
            )
        except _Trouble as trouble:
            return [failed_answer(str(trouble)) for _ in queries]

    def search_sync(self, queries: Sequence[str], top_k: int | None = None) -> list[dict[str, Any]]:
        """:meth:`search` for code without an event loop, such as a command."""

        async def run() -> list[dict[str, Any]]:
            async with self:
                return await self.search(queries, top_k)

        return asyncio.run(run())

    async def publish(self, adapter: bytes, version: int, *, replace: bool = False) -> None:
        """Gives every server an adapter and returns when each says that it serves it.

        Args:
            adapter: the bytes of an ``adapter_model.safetensors``.
            version: its version.
            replace: whether it may take the place of other bytes that were served under this version, which a server
                otherwise refuses: for a training that begins, since every one begins at version 0.

        Raises:
            ValueError: arguments of another type.
            RuntimeError: a server refused it or did not serve it within the deadline; names the server and its reason.
        """
        if not isinstance(adapter, bytes) or not adapter or type(version) is not int or version < 0:
            raise ValueError(f"publish bytes under a version of at least 0, not {type(adapter)} under {version!r}")
        params = {"version": str(version)} | ({"replace": "true"} if replace else {})
        await self._on_all(lambda url: self._publish(url, adapter, version, params))

    async def versions(self) -> dict[str, int]:
        """The adapter version of each server by address. Raises RuntimeError naming those that do not say."""
        return await self._on_all(lambda url: self._version(url, self.attempts))

    async def health(self) -> dict[str, dict[str, Any]]:
        """What each server says about itself by address: documents, dimension, encoder, adapter version.

        Raises:
            RuntimeError: one does not answer or is not a server of this package; names it and the fix.
        """
        return await self._on_all(self._health)

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def __aenter__(self) -> RetrievalClient:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    # ---- one server -------------------------------------------------------------------------------------------

    async def _on_all(self, call: Callable[[str], Any]) -> dict[str, Any]:
        answers = await asyncio.gather(*map(call, self.urls), return_exceptions=True)
        if troubles := [str(answer) for answer in answers if isinstance(answer, _Trouble)]:
            raise RuntimeError("; ".join(troubles))
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(self.urls, answers, strict=True))

    async def _version(self, url: str, attempts: int | None, deadline: float | None = None) -> int:
        return await self._ask([url], read_version, "GET", "/adapter", attempts=attempts, deadline=deadline)

    async def _publish(self, url: str, adapter: bytes, version: int, params: dict[str, str]) -> None:
        end = time.monotonic() + self.deadline
        served = await self._ask(
            [url],
            read_version,
            "POST",
            "/adapter",
            attempts=None,
            params=params,
            data=adapter,
            headers={"Content-Type": "application/octet-stream"},
        )
        while served != version:
            if time.monotonic() + POLL >= end:
                raise _Trouble(f"{url} took version {version} but serves {served} after {self.deadline:g} s")
            await asyncio.sleep(POLL)
            served = await self._version(url, None, end - time.monotonic())

    async def _health(self, url: str) -> dict[str, Any]:
        try:
            state = await self._ask([url], read_health, "GET", "/health", attempts=self.attempts)
            if state.get("draining"):
                raise _Trouble(f"{url} is shutting down")
            return state
        except _Trouble as trouble:
            if trouble.status in (200, 404, 405):
                raise _Trouble(
                    f"{url} is not a verl-bridge server ({trouble}): Search-R1's own server has only /retrieve, which "
                    "names no adapter version; start one with `verl-bridge serve` over the same index and corpus"
                ) from None
            raise _Trouble(f"{trouble}; start it with `verl-bridge serve`, or correct the address") from None

    # ---- requests ---------------------------------------------------------------------------------------------

    async def _ask(
        self,
        urls: list[str],
        read: Callable[[bytes], Any],
        method: str,
        path: str,
        *,
        attempts: int | None,
        deadline: float | None = None,
        **request: Any,
    ) -> Any:
        """What ``read`` makes of an answer from one of ``urls``; ``attempts`` None: until the deadline."""
        deadline = self.deadline if deadline is None else deadline
        end, made = time.monotonic() + deadline, 0
        while True:
            url, made = self._choose(urls), made + 1
            left = end - time.monotonic()
            try:
                body = await self._once(method, url, path, left if made == attempts else left / 2, request)
                self._resting.pop(url, None)
                try:
                    return read(body)
                except ValueError as error:
                    raise _Trouble(f"{url} returned an invalid response to {path}: {error}", status=200) from None
            except _Trouble as trouble:
                if not trouble.again:
                    raise
                self._resting[url] = time.monotonic() + (REST if trouble.wait is None else trouble.wait)
                pause = 0.0
                if all(self._rests(other) for other in urls if other != url):  # else another one is asked at once
                    pause = random.uniform(0, min(LONGEST_WAIT, self.backoff * 2 ** min(made - 1, 16)))
                    pause += trouble.wait or 0.0
                if made == attempts or time.monotonic() + pause >= end:
                    tried = f"given up after {made} attempt{'s' * (made > 1)} within {deadline:g} s"
                    raise _Trouble(f"{trouble} ({tried})", status=trouble.status) from None
            await asyncio.sleep(pause)

    def _rests(self, url: str) -> bool:
        return self._resting.get(url, 0.0) > time.monotonic()

    def _choose(self, urls: list[str]) -> str:
        """The next server in turn that does not rest; where all do, the one that has rested longest."""
        self._turn += 1
        turns = [urls[(self._turn + i) % len(urls)] for i in range(len(urls))]
        return min(turns, key=lambda url: self._resting.get(url, 0.0) if self._rests(url) else 0.0)

    async def _once(self, method: str, url: str, path: str, limit: float, request: dict[str, Any]) -> bytes:
        """The body of an answer with status 200. Raises _Trouble."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=max(limit, 0.001))
        try:
            # a redirect is not followed: it could carry the token elsewhere
            async with self._session().request(
                method, url + path, timeout=timeout, allow_redirects=False, **request
            ) as response:
                body = await self._body(response)
                if body is None:
                    response.close()
                    raise _Trouble(f"{url} gave an answer of more than {self.max_answer} bytes", status=response.status)
        except TimeoutError:
            raise _Trouble(f"{url} did not answer within {limit:.1f} s", again=True) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Trouble(f"{url} cannot be reached ({one_line(str(error) or repr(error))})", again=True) from None
        if response.status == 200:
            return body
        again = response.status in RETRIED
        wait = read_retry_after(response.headers.get("Retry-After")) if again else None
        raise _Trouble(
            f"{url} answered HTTP {response.status}: {read_reason(body)}",
            status=response.status,
            again=again,
            wait=wait,
        )

    async def _body(self, response: aiohttp.ClientResponse) -> bytes | None:
        """All of an answer, None when it is larger than allowed."""
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self.max_answer:
                return None
        return bytes(body)

    def _session(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            self._sessions = {old: kept for old, kept in self._sessions.items() if not old.is_closed()}
            # idle connections go before the server closes them (75 s): a request never meets a closing one
            connector = aiohttp.TCPConnector(limit=256, keepalive_timeout=60.0)
            session = self._sessions[loop] = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return session
