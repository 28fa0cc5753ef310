"""What stands around every handler of the server: token, counters, bounded bodies, clients that hang up."""

from __future__ import annotations

import asyncio
import hmac
import time
from typing import Any

import orjson
from fastapi import HTTPException, Request, Response

from verl_bridge.retrieval.metrics import ServerMetrics

OPEN_PATHS = {"/health"}  # answered without a token


class Gate:
    """Asks for the token, counts and times; plain ASGI, since it is on every request's way.

    Args:
        app: the application behind it.
        metrics: where to count.
        token: bearer token, None for none.
    """

    def __init__(self, app: Any, metrics: ServerMetrics, token: str | None) -> None:
        self._app, self._metrics = app, metrics
        self._expected = None if token is None else b"Bearer " + token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._expected is None or scope["path"] in OPEN_PATHS or self._known(scope):
                await self._app(scope, receive, sending)
            else:
                refusal = json_response({"detail": "give the bearer token: Authorization: Bearer TOKEN"}, 401)
                refusal.headers["WWW-Authenticate"] = "Bearer"
                await refusal(scope, receive, sending)
        finally:
            self._metrics.count(scope["path"], status, started)

    def _known(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)  # in constant time


def json_response(content: Any, status: int = 200) -> Response:
    """An answer in JSON, written by orjson at once."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def check_type(request: Request, wanted: str) -> None:
    """Raises HTTPException 415 for a body of another content type."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
        raise HTTPException(415, f"send the body as Content-Type: {wanted}")


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of which no more than ``limit`` bytes are ever held. Raises HTTPException 413 beyond."""
    length = request.headers.get("content-length", "0")
    size, parts = 0, []
    if not (length.isdecimal() and int(length) > limit):
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
        else:
            return b"".join(parts)
    raise HTTPException(413, f"the body is larger than {limit} bytes")


async def unless_gone(request: Request, answer: asyncio.Future) -> Any:
    """The answer; a client that hangs up first cancels it, which takes its call out of the queue."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    watch = asyncio.ensure_future(hung_up())
    try:
        return await answer
    except asyncio.CancelledError:
        if not watch.done():
            raise  # the server ends this request
        raise HTTPException(499, "the client is gone") from None  # for the counters: nobody reads it
    finally:
        watch.cancel()
