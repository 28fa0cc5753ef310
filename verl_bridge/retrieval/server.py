"""The retriever over HTTP: Search-R1's ``/retrieve``, verl-tool's ``/get_observation``, ``/search`` and ``/adapter``.

The handlers read and write their bodies themselves, with one validation and one dump; the description in
``/openapi.json`` is complete all the same.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

from verl_bridge import __version__
from verl_bridge.retrieval import protocol
from verl_bridge.retrieval.asgi import OPEN_PATHS, Gate, check_type, json_response, read_body, unless_gone
from verl_bridge.retrieval.batching import Busy
from verl_bridge.retrieval.metrics import CONTENT_TYPE, ServerMetrics
from verl_bridge.retrieval.protocol import Invalid
from verl_bridge.retrieval.service import RetrieverService, VersionConflict
from verl_bridge.retrieval.wire import failed_answer, one_line

logger = logging.getLogger(__name__)

PATHS = {"/retrieve", "/search", "/get_observation", "/adapter", "/health", "/metrics", "/openapi.json"}
_WHY = {
    400: "The body is not JSON.",
    401: "The bearer token is missing or wrong.",
    409: "Other bytes were published under this version.",
    413: "The body is too large.",
    415: "The body has another content type.",
    422: "The request cannot be answered; the reason says why.",
    500: "The retriever failed.",
    503: "Too many queries wait, or the server is shutting down; Retry-After says when to try again.",
}


def create_app(
    service: RetrieverService,
    *,
    token: str | None = None,
    shown: int = 3,
    max_queries: int = protocol.MAX_QUERIES,
    max_query_characters: int = protocol.MAX_QUERY_CHARACTERS,
    max_top_k: int = protocol.MAX_TOP_K,
    max_body: int = protocol.MAX_BODY,
) -> FastAPI:
    """The application; its shutdown drains the service.

    Args:
        service: what answers.
        token: bearer token asked for everywhere but at ``/health``; None asks for none.
        shown: documents that the model reads at ``/get_observation``, of the service's ``top_k`` candidates.
        max_queries: most queries in one request.
        max_query_characters: longest query.
        max_top_k: most documents for one query.
        max_body: largest JSON body in bytes; that of an adapter follows from the adapter's own size.

    Raises:
        ValueError: limits that contradict each other, or an empty token.
    """
    if not 1 <= shown <= service.top_k <= max_top_k:
        raise ValueError(
            f"shown={shown}, top_k={service.top_k}, max_top_k={max_top_k}: at least 1, and none below the one before"
        )
    if max_queries > service.queue.max_queue:
        raise ValueError(f"max_queries={max_queries} would never fit max_queue={service.queue.max_queue}; lower it")
    if token is not None and not token.strip():
        raise ValueError("the bearer token is empty; leave it out to serve without one")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.queue.draining = False  # an application may be started again
        yield
        await service.drain()

    # the documentation pages would load scripts from elsewhere
    app = FastAPI(title="verl_bridge retrieval", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    metrics = ServerMetrics(PATHS, lambda: service.queue.queued, lambda: service.describe()["adapter_version"])
    service.queue.on_batch = metrics.batch.observe
    app.add_middleware(Gate, metrics=metrics, token=token)
    app.add_exception_handler(Exception, _failed)
    if token is not None:
        _describe_token(app)
    limits = {"max_queries": max_queries, "max_query_characters": max_query_characters, "max_top_k": max_top_k}
    _add_searches(app, service, metrics, protocol.request_models(**limits), shown, max_body, token)
    _add_adapter(app, service, token)
    _add_health(app, service, metrics, token)
    return app


def _add_searches(
    app: FastAPI,
    service: RetrieverService,
    metrics: ServerMetrics,
    models: protocol.RequestModels,
    shown: int,
    max_body: int,
    token: str | None,
) -> None:
    async def find(request: Request, queries: list[str], top_k: int) -> list[dict[str, Any]]:
        try:
            answers = await unless_gone(request, service.submit(queries, top_k))
        except Busy as busy:
            raise HTTPException(503, one_line(str(busy)), {"Retry-After": str(busy.retry_after)}) from None
        except HTTPException:
            raise
        except Exception:
            metrics.failed.inc(len(queries))
            raise
        if bad := sum(answer["error"] is not None for answer in answers):
            metrics.failed.inc(bad)
        return answers

    async def read(request: Request, model: Any) -> Any:
        check_type(request, "application/json")
        return _checked(protocol.read_json, await read_body(request, max_body), model)

    def post(path: str, model: Any, answer: Any) -> Callable[[Any], Any]:
        body = {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}
        responses = _responses(token, 400, 413, 415, 422, 500, 503)
        return app.post(path, response_model=answer, responses=responses, openapi_extra={"requestBody": body})

    @post("/search", models.search, protocol.SearchResponse)
    async def search(request: Request) -> Response:
        """Candidates for every query. A blank query among others gets a result with status ``error``."""
        call = await read(request, models.search)
        top_k = service.top_k if call.top_k is None else call.top_k
        _checked(protocol.check_size, call.queries, top_k)
        results = await find(request, call.queries, top_k)
        return json_response({"adapter_version": results[0]["adapter_version"], "results": results})

    @post("/retrieve", models.retrieve, protocol.RetrieveResponse)
    async def retrieve(request: Request) -> Response:
        """Search-R1's call. A blank query among others gets an empty list, and so does a request without queries."""
        call = await read(request, models.retrieve)
        top_k = models.retrieve_top_k if call.topk is None else call.topk
        _checked(protocol.check_size, call.queries, top_k)
        answers = await find(request, call.queries, top_k) if call.queries else []
        return json_response({"result": [protocol.passages(answer, call.return_scores) for answer in answers]})

    @post("/get_observation", models.observation, protocol.ObservationResponse)
    async def get_observation(request: Request) -> Response:
        """verl-tool's call: the first action of every model turn is searched for and gives the next observation."""
        call = await read(request, models.observation)
        actions = _checked(protocol.read_actions, call)
        queries = {i: a.content for i, a in enumerate(actions) if a is not None and a.kind == "search"}
        answers = {
            i: failed_answer("the query is too long") for i, q in queries.items() if len(q) > models.longest_query
        }
        asked = [i for i in queries if i not in answers]
        if asked:
            try:
                found = await find(request, [queries[i] for i in asked], service.top_k)
            except HTTPException:
                raise
            except Exception as error:  # the model has to read something, and nothing that looks like evidence
                logger.exception("a retrieval failed")
                found = [failed_answer(str(error) or type(error).__name__)] * len(asked)
            answers |= zip(asked, found, strict=True)
        turns = [protocol.observe(action, answers.get(i), shown) for i, action in enumerate(actions)]
        observations, dones, valids = zip(*turns, strict=True)
        return json_response({"observations": observations, "dones": dones, "valids": valids})


def _add_adapter(app: FastAPI, service: RetrieverService, token: str | None) -> None:
    @app.get("/adapter", response_model=protocol.AdapterState, responses=_responses(token))
    async def adapter(request: Request) -> Response:
        """The adapter version that serves, and the SHA-256 of its file."""
        version, digest = await service.adapter()
        return json_response({"adapter_version": version, "sha256": digest})

    number = {"type": "integer", "minimum": 0, "maximum": protocol.MAX_VERSION}
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

    @app.post(
        "/adapter",
        response_model=protocol.Published,
        responses=_responses(token, 409, 413, 415, 422),
        openapi_extra={
            "parameters": [
                {"name": "version", "in": "query", "required": True, "schema": number},
                {"name": "replace", "in": "query", "schema": {"type": "string", "enum": ["true", "false"]}},
            ],
            "requestBody": {"required": True, "content": content},
        },
    )
    async def publish(request: Request) -> Response:
        """Serves the adapter in the body (``adapter_model.safetensors``) from the next batch on; safe to repeat."""
        check_type(request, "application/octet-stream")
        given = request.query_params.getlist("version")
        if len(given) != 1 or not re.fullmatch(r"[0-9]{1,16}", given[0]) or int(given[0]) > protocol.MAX_VERSION:
            raise HTTPException(422, f"version: give one whole number from 0 to {protocol.MAX_VERSION}")
        version = int(given[0])
        replace = request.query_params.getlist("replace") or ["false"]
        if replace not in (["true"], ["false"]):
            raise HTTPException(422, "replace: give true or false")
        # the same tensors in float64 and a long header still fit
        body = await read_body(request, 2 * await service.adapter_size() + (1 << 16))
        try:
            await service.publish(body, version, replace == ["true"])
        except VersionConflict as error:
            raise HTTPException(409, one_line(str(error))) from None
        except ValueError as error:
            raise HTTPException(422, one_line(str(error))) from None
        return json_response({"adapter_version": version})


def _add_health(app: FastAPI, service: RetrieverService, metrics: ServerMetrics, token: str | None) -> None:
    started = time.monotonic()

    @app.get("/health", response_model=protocol.Health)
    async def health(request: Request) -> Response:
        """Whether the service answers, and what it serves. Never waits for the model, needs no token."""
        draining = service.queue.draining
        state = {"status": "draining" if draining else "ok", "draining": draining}
        return json_response({**state, **service.describe(), "uptime_seconds": time.monotonic() - started})

    text = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus' text form."}}

    @app.get("/metrics", response_class=Response, responses={**text, **_responses(token)})
    async def show_metrics(request: Request) -> Response:
        """Counters for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)


def _checked(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Invalid as error:
        raise HTTPException(error.status, str(error)) from None


async def _failed(request: Request, error: Exception) -> Response:
    return json_response({"detail": f"the retriever failed: {one_line(str(error)) or type(error).__name__}"}, 500)


def _responses(token: str | None, *statuses: int) -> dict[int | str, dict[str, Any]]:
    declared = [*statuses, *([] if token is None else [401])]
    return {status: {"model": protocol.Refusal, "description": _WHY[status]} for status in declared}


def _describe_token(app: FastAPI) -> None:
    plain = app.openapi

    def described() -> dict[str, Any]:
        schema = plain()
        schema.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path in OPEN_PATHS else [{"bearer": []}]
        return schema

    app.openapi = described
