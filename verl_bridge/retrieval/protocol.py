"""The service's wire: what it reads and answers, as models for checking and for the OpenAPI description.

Types are strict: "3" and true are not integers (3.0 is one, as in any JSON schema). The two endpoints that existing
clients call (Search-R1's ``/retrieve``, verl-tool's ``/get_observation``) ignore fields they do not know, as those
clients' own servers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from verl_bridge.qa.actions import CORRECTION, NOTHING_FOUND, RETRIEVAL_FAILED, Action, format_observation, parse_action
from verl_bridge.retrieval.corpus import Document
from verl_bridge.retrieval.wire import one_line

RETRIEVE_TOP_K = 3  # Search-R1's default
MAX_QUERIES = 4096  # Search-R1 sends one request for a whole batch of rollouts: 512 prompts × 5 are 2,560
MAX_QUERY_CHARACTERS = 16_384
MAX_FIELDS = 32  # in a request's object
MAX_TOP_K = 1000
MAX_DOCUMENTS = 65_536  # queries × top_k, which bounds an answer's size
MAX_BODY = 16 << 20  # bytes
MAX_VERSION = 2**53 - 1  # what every JSON reader can hold


class Invalid(ValueError):
    """A request that cannot be answered, with a short reason that repeats little of what was sent.

    Args:
        reason: for the caller.
        status: the HTTP status that fits.
    """

    def __init__(self, reason: str, status: int = 422) -> None:
        super().__init__(one_line(reason))
        self.status = status


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value  # JSON knows one kind of number


class RequestModels(NamedTuple):
    """The three bodies that clients post, with one server's limits in them; an action may be longer than a query."""

    search: type[BaseModel]
    retrieve: type[BaseModel]
    observation: type[BaseModel]
    longest_query: int  # characters
    retrieve_top_k: int  # where ``/retrieve`` does not say


def request_models(
    *,
    max_queries: int = MAX_QUERIES,
    max_query_characters: int = MAX_QUERY_CHARACTERS,
    max_top_k: int = MAX_TOP_K,
) -> RequestModels:
    """Models of the requests.

    Args:
        max_queries: most queries, or actions, in one request.
        max_query_characters: longest query.
        max_top_k: most documents for one query.
    """
    query = Annotated[str, StringConstraints(max_length=max_query_characters)]
    depth = Annotated[int, Field(ge=1, le=max_top_k), BeforeValidator(_whole)]
    some = Field(min_length=1, max_length=max_queries)
    # for the description; check_size looks for it, and Python counts five more characters as blank
    not_blank = {"contains": {"type": "string", "pattern": r"[^\s\u001c-\u001f\u0085]"}}
    searched = Field(min_length=1, max_length=max_queries, json_schema_extra=not_blank)
    # Search-R1 also asks in turns in which no rollout searches
    empty_too = Field(max_length=max_queries, json_schema_extra={"anyOf": [{"maxItems": 0}, not_blank]})

    class SearchRequest(BaseModel):
        model_config = ConfigDict(strict=True, extra="forbid")
        queries: Annotated[list[query], searched]
        top_k: depth | None = None

    class RetrieveRequest(BaseModel):
        model_config = ConfigDict(strict=True)
        queries: Annotated[list[query], empty_too]
        topk: depth | None = None
        return_scores: bool = False

    class ObservationRequest(BaseModel):
        model_config = ConfigDict(strict=True)
        trajectory_ids: Annotated[list[str], some]
        actions: Annotated[list[str], some]
        finish: Annotated[list[bool], some] | None = None
        is_last_step: Annotated[list[bool], some] | None = None
        extra_fields: Annotated[list[dict[str, Any]], some] | None = None

    return RequestModels(
        SearchRequest, RetrieveRequest, ObservationRequest, max_query_characters, min(RETRIEVE_TOP_K, max_top_k)
    )


class FoundDocument(BaseModel):
    """A document of ``/search``."""

    id: str
    title: str
    text: str


class SearchResult(BaseModel):
    """The answer to one query; ``error`` says why there is none."""

    status: Literal["ok", "error"]
    error: str | None
    ids: list[str]
    scores: list[float]
    documents: list[FoundDocument]
    adapter_version: int


class SearchResponse(BaseModel):
    """The answers of ``/search``, in the order of the queries and all from one adapter version."""

    adapter_version: int
    results: list[SearchResult]


class Passage(BaseModel):
    """A document in Search-R1's form."""

    id: str
    contents: str


class ScoredPassage(BaseModel):
    """A document in Search-R1's form with its score."""

    document: Passage
    score: float


class RetrieveResponse(BaseModel):
    """The answers of ``/retrieve``, in the order of the queries; with ``return_scores`` the scored form."""

    result: list[list[ScoredPassage]] | list[list[Passage]]


class Observation(BaseModel):
    """What the model reads next, and what the trainer learns from."""

    obs: str
    status: Literal["ok", "error", "none"]
    error: str | None
    query: str
    ids: list[str]
    scores: list[float]
    candidates: list[FoundDocument]
    shown: int
    adapter_version: int | None
    invalid_reason: str | None


class ObservationResponse(BaseModel):
    """verl-tool's answer, one entry per action."""

    observations: list[Observation]
    dones: list[bool]
    valids: list[bool]


class AdapterState(BaseModel):
    """What serves now."""

    adapter_version: int
    sha256: str


class Published(BaseModel):
    """The version that serves from now on."""

    adapter_version: int


class Health(BaseModel):
    """How the service is."""

    status: Literal["ok", "draining"]
    adapter_version: int
    documents: int
    dim: int
    encoder: str
    draining: bool
    uptime_seconds: float


class Refusal(BaseModel):
    """Why a request was not answered."""

    detail: str


def read_json(body: bytes, model: type[BaseModel]) -> Any:
    """A checked request. orjson reads first: unlike pydantic it refuses NaN, which is not JSON.

    Raises:
        Invalid: not JSON, or not what the model describes; the reason names the field.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:  # also bad UTF-8, half a surrogate pair, deep nesting
        raise Invalid(f"the body is not JSON: {error.msg} (character {error.pos})", 400) from None
    if isinstance(value, dict) and len(value) > MAX_FIELDS:  # before an error is made for each
        raise Invalid(f"the body has {len(value)} fields; give at most {MAX_FIELDS}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise Invalid(_faults(error)) from None


def _faults(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    texts = [f"{'.'.join(str(part)[:40] for part in fault['loc'])}: {fault['msg']}" for fault in found[:3]]
    return "; ".join(texts) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")


def check_size(queries: Sequence[str], top_k: int) -> None:
    """Raises Invalid when the answer would be too large, or when there is nothing to search for."""
    if len(queries) * top_k > MAX_DOCUMENTS:
        raise Invalid(f"{len(queries)} queries × top_k {top_k} are more than {MAX_DOCUMENTS} documents; ask for fewer")
    if queries and not any(query.strip() for query in queries):
        raise Invalid("queries: blank; there is nothing to search for")


def passages(answer: dict[str, Any], scores: bool) -> list[dict[str, Any]]:
    """One answer in Search-R1's form: ``contents`` is the corpus's own string. A failed query has no passages."""
    found = [{"id": d["id"], "contents": Document(**d).contents} for d in answer["documents"]]
    if not scores:
        return found
    return [{"document": passage, "score": s} for passage, s in zip(found, answer["scores"], strict=True)]


def read_actions(request: Any) -> list[Action | None]:
    """The action in every model turn of an ObservationRequest; None where a trajectory only says goodbye.

    Raises:
        Invalid: the request's lists differ in length.
    """
    count = len(request.actions)
    for name in ("trajectory_ids", "finish", "is_last_step", "extra_fields"):
        values = getattr(request, name)
        if values is not None and len(values) != count:
            raise Invalid(f"{name}: {len(values)} entries for {count} actions")
    finish = request.finish or [False] * count
    return [None if done else parse_action(turn) for turn, done in zip(request.actions, finish, strict=True)]


def observe(action: Action | None, answer: dict[str, Any] | None, shown: int) -> tuple[dict[str, Any], bool, bool]:
    """What verl-tool is told about one turn: observation, done, valid.

    As with verl-tool's own search tool, valid means a search that was answered, so ``<answer>`` is done and not valid.
    A failed search is neither done nor valid and shows no information block.

    Args:
        action: the turn's action, None to say goodbye.
        answer: of the retriever, for a search.
        shown: documents the model reads; the others are candidates for the trainer.
    """
    told = {"obs": "", "status": "none", "error": None, "query": "", "ids": [], "scores": [], "candidates": []}
    told |= {"shown": 0, "adapter_version": None, "invalid_reason": None}
    if action is None or action.kind == "answer":
        return told, True, action is None
    if action.kind == "malformed":
        return told | {"obs": CORRECTION, "invalid_reason": "no valid action"}, False, False
    told |= {key: answer[key] for key in ("status", "error", "ids", "scores", "adapter_version")}
    told |= {"query": action.content, "candidates": answer["documents"]}
    if answer["status"] == "error":
        return told | {"obs": RETRIEVAL_FAILED, "invalid_reason": answer["error"]}, False, False
    seen = [Document(**document) for document in answer["documents"][:shown]]
    return told | {"obs": format_observation(seen) if seen else NOTHING_FOUND, "shown": len(seen)}, False, True
