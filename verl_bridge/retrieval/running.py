"""Runs the application under uvicorn: one line when it serves, and an end that answers what was begun."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

BACKLOG = 2048  # connections that the kernel keeps while the server is busy
KEEP_ALIVE = 75  # seconds; rollouts pause for a training step, and a closed connection costs a client an error


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def bind(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that is bound but does not listen yet, and the address it will serve at.

    Args:
        host: address or name; an IPv6 one works as well.
        port: 0 takes a free one.

    Raises:
        OSError: names address and port and the fix.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(f"cannot serve on {host}:{port} ({reason}); choose another --host or --port") from error
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    return made, f"http://{shown}:{made.getsockname()[1]}"


def serve(app: Any, listener: socket.socket, *, ready: Callable[[], None], graceful_seconds: float = 30.0) -> None:
    """Serves until SIGTERM or SIGINT; then closes the door, answers what was begun and returns.

    Args:
        app: what :func:`verl_bridge.retrieval.server.create_app` gives.
        listener: from :func:`bind`.
        ready: called once requests are answered.
        graceful_seconds: how long requests that were begun may take after the signal.

    Raises:
        KeyboardInterrupt: after SIGINT, once everything is closed.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,  # nobody's word on where a request comes from is taken
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=graceful_seconds,
    )
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal once more when it is done; an end by SIGTERM is not a failure here
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    _Server(config, ready).run(sockets=[listener])
