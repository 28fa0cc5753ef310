"""What a client and a server have in common, and reading what a server sent.

Nothing of that is trusted: shape, counts, numbers and text are looked at.
"""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any

LONGEST_WAIT = 10.0  # seconds; no server makes a client wait longer before it tries again
LONGEST_REASON = 300  # characters of an error's reason


def one_line(text: str) -> str:
    """Text from elsewhere as one short line that can go into a log."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST_REASON]).split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"


def failed_answer(reason: str) -> dict[str, Any]:
    """The answer to a query that could not be searched for, in the form of ``Retrieved.to_dict``."""
    failed = {"status": "error", "error": one_line(reason), "ids": [], "scores": [], "documents": []}
    return failed | {"adapter_version": None}


def read_results(body: bytes, queries: int, top_k: int | None) -> list[dict[str, Any]]:
    """The answers in the body of a ``/search``, with the keys of ``Retrieved.to_dict`` and no others.

    Raises:
        ValueError: it is not one answer from one adapter version per query; says where it departs.
    """
    answer = _json(body)
    version = _version_of(answer)
    results = answer.get("results")
    _need(isinstance(results, list), "no list of results")
    _need(len(results) == queries, f"{len(results)} results for {queries} queries")
    return [_result(result, version, top_k) for result in results]


def _result(result: Any, version: int, top_k: int | None) -> dict[str, Any]:
    _need(isinstance(result, dict), "a result is not an object")
    _need(_version_of(result) == version, f"a result of version {result.get('adapter_version')} in one of {version}")
    status, error = result.get("status"), result.get("error")
    good = (status == "ok" and error is None) or (status == "error" and isinstance(error, str))
    _need(good, f"status {str(status)[:20]!r} with error {str(error)[:80]!r}")
    ids, scores, documents = (result.get(key) for key in ("ids", "scores", "documents"))
    _need(all(isinstance(column, list) for column in (ids, scores, documents)), "ids, scores, documents are not lists")
    sizes = (len(ids), len(scores), len(documents))
    _need(len(set(sizes)) == 1, f"{sizes[0]} ids, {sizes[1]} scores, {sizes[2]} documents")
    _need(top_k is None or sizes[0] <= top_k, f"{sizes[0]} documents where {top_k} were asked for")
    _need(status == "ok" or sizes[0] == 0, "documents beside an error")
    _need(all(isinstance(i, str) and i for i in ids), "an id that is not text")
    finite = all(type(score) in (int, float) and isfinite(score) for score in scores)
    _need(finite, "a score that is not a finite number")
    read = []
    for identifier, document in zip(ids, documents, strict=True):
        _need(isinstance(document, dict), "a document is not an object")
        fields = {key: document.get(key) for key in ("id", "title", "text")}
        _need(all(isinstance(value, str) for value in fields.values()), "a document without id, title or text")
        _need(fields["id"] == identifier, f"document {fields['id'][:80]!r} under the id {identifier[:80]!r}")
        read.append(fields)
    return {
        "status": status,
        "error": None if error is None else one_line(error) or "no reason given",
        "ids": ids,
        "scores": [float(score) for score in scores],
        "documents": read,
        "adapter_version": version,
    }


def _need(ok: bool, otherwise: str) -> None:
    if not ok:
        raise ValueError(otherwise)


def _json(body: bytes) -> dict[str, Any]:
    """A JSON object; orjson refuses NaN, bad UTF-8, halves of surrogate pairs and deep nesting."""
    import orjson

    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON ({one_line(str(error))})") from None
    _need(isinstance(answer, dict), "not a JSON object")
    return answer


def _version_of(answer: dict[str, Any]) -> int:
    version = answer.get("adapter_version")
    _need(type(version) is int and version >= 0, f"adapter_version {str(version)[:20]!r}")
    return version


def read_version(body: bytes) -> int:
    """The version in an answer of ``/adapter``. Raises ValueError when there is none."""
    return _version_of(_json(body))


def read_health(body: bytes) -> dict[str, Any]:
    """What a server says about itself. Raises ValueError when its version, size, dimension or encoder are missing."""
    answer = _json(body)
    _version_of(answer)
    for key in ("documents", "dim"):
        _need(type(answer.get(key)) is int and answer[key] > 0, f"{key} {str(answer.get(key))[:20]!r}")
    _need(isinstance(answer.get("encoder"), str), "no encoder")
    return answer | {"encoder": one_line(answer["encoder"])}


def read_reason(body: bytes) -> str:
    """The reason in an error's body."""
    import orjson

    try:
        detail = orjson.loads(body)["detail"]
        text = detail if isinstance(detail, str) else orjson.dumps(detail).decode()
    except (ValueError, KeyError, TypeError):
        text = body[: 4 * LONGEST_REASON].decode("utf-8", "replace")
    return one_line(text) or "no reason given"


def read_retry_after(value: str | None) -> float | None:
    """Seconds that a server asks to wait, in seconds or as a date; at most LONGEST_WAIT."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT) if seconds == seconds else None
