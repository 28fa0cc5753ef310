"""Nothing received is trusted: an answer that departs from what was asked for is refused, whatever it holds."""

from __future__ import annotations

import copy
import json
import time
from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_bridge.retrieval.wire import read_health, read_reason, read_results, read_retry_after, read_version

GOOD = {
    "adapter_version": 3,
    "results": [
        {
            "status": "ok",
            "error": None,
            "ids": ["a", "b"],
            "scores": [0.5, 0],
            "documents": [{"id": "a", "title": "A", "text": "x", "more": 1}, {"id": "b", "title": "", "text": "مدينة"}],
            "adapter_version": 3,
            "took": 12,
        },
        {"status": "error", "error": "blank\nquery", "ids": [], "scores": [], "documents": [], "adapter_version": 3},
    ],
}


def read(answer, queries=2, top_k=2):
    return read_results(answer if isinstance(answer, bytes) else json.dumps(answer).encode(), queries, top_k)


def test_a_good_answer_keeps_the_known_keys_alone():
    ok, error = read(GOOD)
    assert ok == {
        "status": "ok",
        "error": None,
        "ids": ["a", "b"],
        "scores": [0.5, 0.0],
        "documents": [{"id": "a", "title": "A", "text": "x"}, {"id": "b", "title": "", "text": "مدينة"}],
        "adapter_version": 3,
    }
    assert error == GOOD["results"][1] | {"error": "blank query"}
    assert (
        read({**GOOD, "results": [GOOD["results"][0] | {"ids": [], "scores": [], "documents": []}]}, 1)[0]["ids"] == []
    )


def changed(path, value):
    answer = copy.deepcopy(GOOD)
    place = answer
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return answer


RESULT = ["results", 0]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["results"], {}, "no list of results"),
        (["results"], GOOD["results"][:1], "1 results for 2 queries"),
        (["results", 0], None, "a result is not an object"),
        (["adapter_version"], None, "adapter_version 'None'"),
        (["adapter_version"], True, "adapter_version 'True'"),
        (["adapter_version"], -1, "adapter_version '-1'"),
        ([*RESULT, "adapter_version"], 4, "a result of version 4 in one of 3"),
        ([*RESULT, "status"], "none", "status 'none'"),
        ([*RESULT, "error"], "x", "status 'ok' with error 'x'"),
        (["results", 1, "error"], None, "status 'error' with error 'None'"),
        ([*RESULT, "ids"], "ab", "are not lists"),
        ([*RESULT, "ids"], ["a"], "1 ids, 2 scores, 2 documents"),
        ([*RESULT, "scores"], [1.0], "2 ids, 1 scores, 2 documents"),
        ([*RESULT, "documents"], [], "2 ids, 2 scores, 0 documents"),
        ([*RESULT, "status"], "error", "with error 'None'"),
        (["results", 1], GOOD["results"][0] | {"status": "error", "error": "x"}, "documents beside an error"),
        ([*RESULT, "ids", 0], 1, "an id that is not text"),
        ([*RESULT, "ids", 0], "", "an id that is not text"),
        ([*RESULT, "ids", 0], "z", "document 'a' under the id 'z'"),
        ([*RESULT, "scores", 0], "1", "a score that is not a finite number"),
        ([*RESULT, "scores", 0], True, "a score that is not a finite number"),
        ([*RESULT, "documents", 0], "a", "a document is not an object"),
        ([*RESULT, "documents", 0], {"id": "a", "title": "A"}, "without id, title or text"),
        ([*RESULT, "documents", 0, "text"], None, "without id, title or text"),
    ],
    ids=str,
)
def test_departures_are_named(path, value, says):
    with pytest.raises(ValueError, match=says):
        read(changed(path, value))


def test_more_documents_than_asked_for():
    with pytest.raises(ValueError, match="2 documents where 1 were asked for"):
        read(GOOD, top_k=1)
    assert len(read(GOOD, top_k=None)[0]["ids"]) == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'{"adapter_version": 3, "results": [',
        b"\xff",
        json.dumps(changed([*RESULT, "scores", 0], float("nan"))).encode(),
        json.dumps(changed([*RESULT, "scores", 0], float("inf"))).encode(),
        json.dumps(GOOD).replace("0.5", "1e999").encode(),
        json.dumps(changed([*RESULT, "documents", 0, "text"], "\ud800")).encode(),
        b'{"adapter_version": 3, "results": ' + b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_answer_at_all(body):
    with pytest.raises(ValueError):
        read(body)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, *GOOD["results"][0]]), inner),
    max_leaves=6,
)
places = st.sampled_from(
    [["results"], ["adapter_version"], *([*RESULT, key] for key in GOOD["results"][0]), [*RESULT, "documents", 0]]
)


@settings(deadline=None)
@given(path=places, value=values)
def test_whatever_comes_is_read_or_refused(path, value):
    """Never another exception; and what is read holds the promises that callers build on."""
    try:
        results = read(changed(path, value))
    except ValueError:
        return
    for result in results:
        assert len(result["ids"]) == len(result["scores"]) == len(result["documents"]) <= 2
        assert (result["status"] == "ok") == (result["error"] is None) and result["adapter_version"] == 3
        assert [document["id"] for document in result["documents"]] == result["ids"]


def test_versions_and_health():
    assert read_version(b'{"adapter_version": 0, "sha256": "x"}') == 0
    state = {"adapter_version": 2, "documents": 5, "dim": 8, "encoder": "e5", "uptime_seconds": 1.5}
    assert read_health(json.dumps(state).encode()) == state
    for key, value in (("documents", 0), ("documents", None), ("dim", True), ("dim", "8"), ("encoder", None)):
        with pytest.raises(ValueError, match=key):
            read_health(json.dumps(state | {key: value}).encode())
    for body in (b'{"status": "ok"}', b"{}", b"no", b'{"adapter_version": "2"}', b'{"adapter_version": 2.0}'):
        for reader in (read_version, read_health):
            with pytest.raises(ValueError, match=r"adapter_version|not JSON"):
                reader(body)


def test_waits():
    cases = {"2": 2.0, "0": 0.0, "-3": 0.0, "3600": 10.0, "9" * 5000: 10.0, "nan": None, "soon": None, "": None}
    assert {text: read_retry_after(text) for text in cases} == cases
    assert read_retry_after(None) is None
    assert 1 < read_retry_after(formatdate(time.time() + 4, usegmt=True)) <= 4
    assert read_retry_after(formatdate(time.time() - 60, usegmt=True)) == 0.0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_a_reason_is_one_short_printable_line(body):
    reason = read_reason(body)
    assert reason and len(reason) <= 300 and reason.isprintable()
