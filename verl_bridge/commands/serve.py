"""``verl-bridge serve``, an index over HTTP, and ``verl-bridge publish``, another adapter for it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from verl_bridge.commands.options import add_command, add_retriever_arguments, positive, retriever_settings
from verl_bridge.config.schema import RetrieverConfig

TOKEN = RetrieverConfig.token_env


def add(commands: Any) -> None:
    """Adds ``serve`` and ``publish`` to the parser."""
    text = "serve an index over HTTP: Search-R1's /retrieve, verl-tool's /get_observation, /search, /adapter"
    serve = commands.add_parser("serve", help=text, description=text[0].upper() + text[1:] + ".")
    add_retriever_arguments(serve)
    serve.set_defaults(run=_serve, compute_dtype="auto")
    serve.add_argument("--host", default="127.0.0.1", help="address to serve at (default: only this machine)")
    serve.add_argument("--port", type=_port, default=8000, help="0 takes a free one and says which")
    serve.add_argument(
        "--token-env",
        metavar="NAME",
        help=f"environment variable that holds the bearer token clients must send (default: {TOKEN}, if it is set)",
    )
    serve.add_argument("--adapter", help="adapter folder of a run, to serve from the start")
    serve.add_argument("--adapter-version", type=_count, help="its version (default: 1 with --adapter, else 0)")
    serve.add_argument("--max-batch", type=positive, default=128, help="most queries in one encoder batch")
    serve.add_argument("--max-wait-ms", type=float, default=2.0, help="longest wait of a query for others, while idle")
    serve.add_argument("--max-queue", type=positive, default=8192, help="most queries that wait, then 503")
    serve.add_argument("--max-queries", type=positive, default=4096, help="most queries in one request")
    serve.add_argument("--threads", type=positive, help="CPU threads of encoder and search (default: all cores)")
    serve.add_argument("--shown", type=positive, default=3, help="documents in an observation")
    serve.add_argument("--top-k", type=positive, default=10, help="candidates per query when a request does not say")
    serve.add_argument("--grace", type=positive, default=30, help="seconds for begun requests after SIGTERM")

    publish = add_command(commands, "publish", _publish, "give running servers an adapter, while they serve")
    publish.add_argument("--url", required=True, help="the server, or several, comma-separated")
    publish.add_argument("--adapter", required=True, help="adapter folder of a run")
    publish.add_argument("--version", type=_count, required=True, help="the version it serves as")
    publish.add_argument("--replace", action="store_true", help="also if the server knows another under this version")
    publish.add_argument("--token-env", metavar="NAME", help=f"variable that holds the bearer token (default: {TOKEN})")


def _publish(options: argparse.Namespace) -> int:
    from verl_bridge.retrieval.client import RetrievalClient

    file = Path(options.adapter) / "adapter_model.safetensors"
    if not file.is_file():
        raise ValueError(f"--adapter {options.adapter} holds no adapter_model.safetensors; give the adapter's folder")
    adapter = file.read_bytes()

    async def send() -> dict[str, int]:
        async with RetrievalClient(options.url, token=_token(options.token_env)) as client:
            await client.publish(adapter, options.version, replace=options.replace)
            return await client.versions()

    serving = asyncio.run(send())
    if options.json:
        print(json.dumps({"serving": serving}))
    else:
        print("\n".join(f"{url} serves adapter version {version}" for url, version in serving.items()))
    return 0


def _serve(options: argparse.Namespace) -> int:
    token = _token(options.token_env)
    if not 0 <= options.max_wait_ms <= 10_000:
        raise ValueError(f"--max-wait-ms {options.max_wait_ms}: give 0 to 10000 milliseconds")
    if options.adapter_version is not None and not options.adapter:
        raise ValueError("--adapter-version is given without --adapter; give the adapter's folder too")
    from verl_bridge.retrieval.running import bind, serve
    from verl_bridge.retrieval.server import create_app
    from verl_bridge.retrieval.service import RetrieverService

    listener, url = bind(options.host, options.port)  # before the models load: a port that is taken shows at once
    if token is None and not ip_address(listener.getsockname()[0]).is_loopback:
        print(
            f"verl-bridge: serving on {options.host} without a token: whoever reaches this port can search and replace "
            f"the adapter; set {TOKEN}",
            file=sys.stderr,
        )
    version = options.adapter_version
    service = RetrieverService(
        **retriever_settings(options),
        top_k=options.top_k,
        adapter=options.adapter,
        adapter_version=version if version is not None else int(options.adapter is not None),
        max_batch=options.max_batch,
        max_wait=options.max_wait_ms / 1000,
        max_queue=options.max_queue,
        threads=options.threads or len(os.sched_getaffinity(0)),
    )
    max_queries = min(options.max_queries, options.max_queue)
    app = create_app(service, token=token, shown=min(options.shown, options.top_k), max_queries=max_queries)

    def ready() -> None:
        held = service.describe()
        print(
            f"serving on {url} ({held['documents']} documents × {held['dim']}, "
            f"adapter version {held['adapter_version']})",
            flush=True,
        )

    serve(app, listener, ready=ready, graceful_seconds=options.grace)
    return 0


def _token(name: str | None) -> str | None:
    token = os.environ.get(name or TOKEN)
    if token is None and name is None:
        return None
    if token is None or not token.strip() or not token.isascii() or not token.isprintable():
        raise ValueError(f"environment variable {name or TOKEN} holds no usable token; set it to printable ASCII text")
    return token


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
