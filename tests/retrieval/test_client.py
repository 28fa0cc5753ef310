"""The client against servers on loopback that misbehave as told: what is tried again, how often, and for how long."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_bridge.retrieval import client as module
from verl_bridge.retrieval.client import RetrievalClient, split_urls

QUERIES = ["money of Hollin", "a \ud800 town"]  # the second is no valid Unicode and is sent with a question mark


def found(queries, top_k=3, version=7):
    ids = [f"d{i}" for i in range(top_k or 3)]
    documents = [{"id": i, "title": f"about {i}", "text": "x"} for i in ids]
    scores = [1.0 - n / 10 for n in range(len(ids))]
    one = {"status": "ok", "error": None, "ids": ids, "scores": scores, "documents": documents}
    return {"adapter_version": version, "results": [{**one, "adapter_version": version} for _ in queries]}


class Scripted:
    """Answers each request with the next step of its script, then for ever with the last; ``calls`` remembers all."""

    def __init__(self, *steps, version=7):
        self.steps, self.calls, self.version, self.released = list(steps) or ["ok"], [], version, asyncio.Event()

    async def handle(self, request):
        body = await request.read()
        self.calls.append((request.method, request.path_qs, dict(request.headers), body))
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if callable(step):
            return await step(self, request, body)
        if isinstance(step, tuple):
            status, headers, text = step
            return web.Response(status=status, headers=headers, text=text)
        if step == "hang":
            await self.released.wait()
        if step == "drop":
            request.transport.abort()
        if step == "half":
            answer = web.StreamResponse(headers={"Content-Length": "1000"})
            await answer.prepare(request)
            await answer.write(b'{"adapter_version": 7,')
            request.transport.close()
            return answer
        if request.path == "/search":
            asked = json.loads(body)
            return web.json_response(found(asked["queries"], asked["top_k"], self.version))
        if request.method == "POST":
            self.version = int(request.query["version"])
        return web.json_response({"adapter_version": self.version})


@asynccontextmanager
async def serving(*scripts):
    servers = []
    for script in scripts:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", script.handle)
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
    try:
        yield [str(server.make_url("")).rstrip("/") for server in servers]
    finally:
        for script, server in zip(scripts, servers, strict=True):
            script.released.set()
            await server.close()


def ask(*scripts, call=lambda client: client.search(QUERIES, 2), **settings):
    """What a client of these servers gets, and the seconds it took."""

    async def run():
        async with serving(*scripts) as urls, RetrievalClient(urls, **{"backoff": 0.01, **settings}) as client:
            started = time.monotonic()
            return await call(client), time.monotonic() - started

    return asyncio.run(run())


def unused_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_search_is_one_request_and_comes_back_as_the_server_said():
    server = Scripted()
    answers, _ = ask(server, token="secret")
    assert answers == found(QUERIES, 2)["results"]
    ((method, path, headers, body),) = server.calls
    assert (method, path, headers["Authorization"]) == ("POST", "/search", "Bearer secret")
    assert json.loads(body) == {"queries": ["money of Hollin", "a ? town"], "top_k": 2}


def test_many_searches_share_connections():
    ports = set()

    async def remember(server, request, body):
        ports.add(request.transport.get_extra_info("peername")[1])
        return web.json_response(found(json.loads(body)["queries"], 2))

    async def twenty(client):
        return [await client.search(["x"], 2) for _ in range(20)]

    answers, _ = ask(Scripted(remember), call=twenty)
    assert len(ports) == 1 and {a[0]["status"] for a in answers} == {"ok"}


@pytest.mark.parametrize("queries", [None, "Lima", [None], [b"x"]])
def test_wrong_queries_are_refused_before_anything_is_sent(queries):
    server = Scripted()
    with pytest.raises(ValueError, match="give a list of strings"):
        ask(server, call=lambda client: client.search(queries))
    assert server.calls == []


@pytest.mark.parametrize("top_k", [0, -1, True, 2.0, "2"])
def test_a_wrong_top_k_is_refused_before_anything_is_sent(top_k):
    server = Scripted()
    with pytest.raises(ValueError, match="ask for at least 1 document"):
        ask(server, call=lambda client: client.search(["x"], top_k))
    assert server.calls == []


def test_no_queries_need_no_server():
    client = RetrievalClient(unused_address())
    assert client.search_sync([]) == []


UNAVAILABLE = [(status, {}, "later") for status in (429, 502, 503, 504)]


@pytest.mark.parametrize("trouble", [*UNAVAILABLE, "drop", "half"], ids=str)
def test_passing_trouble_is_tried_again(trouble):
    server = Scripted(trouble, trouble, "ok")
    answers, _ = ask(server)
    assert [a["status"] for a in answers] == ["ok", "ok"] and len(server.calls) == 3


@pytest.mark.parametrize("trouble", [*UNAVAILABLE, "drop", "half"], ids=str)
def test_lasting_trouble_is_an_error_after_the_attempts(trouble):
    server = Scripted(trouble)
    answers, _ = ask(server, attempts=3)
    assert len(server.calls) == 3 and len(answers) == 2
    for answer in answers:
        assert (answer["status"], answer["ids"], answer["documents"]) == ("error", [], [])
        assert answer["adapter_version"] is None and "given up after 3 attempts" in answer["error"]
    if isinstance(trouble, tuple):
        assert f"HTTP {trouble[0]}: later" in answers[0]["error"]


REFUSALS = [
    ((400, {}, '{"detail": "queries are too many"}'), "HTTP 400: queries are too many"),
    ((401, {}, '{"detail": "bearer token"}'), "HTTP 401: bearer token"),
    ((404, {}, "nothing\nhere\x1b[31m"), "HTTP 404: nothing here [31m"),
    ((422, {}, '{"detail": [{"loc": ["top_k"]}]}'), 'HTTP 422: [{"loc":["top_k"]}]'),
    ((500, {}, ""), "HTTP 500: no reason given"),
    ((302, {"Location": "/elsewhere"}, ""), "HTTP 302"),
    ((200, {}, "<html>"), "not JSON"),
    ((200, {}, '{"adapter_version": 7, "results": []}'), "0 results for 2 queries"),
]


@pytest.mark.parametrize(("answer", "reason"), REFUSALS, ids=str)
def test_refusals_and_garbage_are_not_tried_again(answer, reason):
    server = Scripted(answer)
    answers, _ = ask(server)
    assert len(server.calls) == 1 and answers[0]["status"] == "error" and reason in answers[0]["error"]


def test_a_reason_is_short():
    answers, _ = ask(Scripted((400, {}, "a" * 100_000)))
    assert len(answers[0]["error"]) == 300 and re.search(r" answered HTTP 400: a{200,}…$", answers[0]["error"])


def test_an_answer_larger_than_allowed_is_not_read_on():
    sent = []

    async def endless(server, request, body):
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(10_000):  # 640 MB in all
            await answer.write(b" " * 65_536)
            sent.append(65_536)
        return answer

    answers, _ = ask(Scripted(endless), max_answer=100_000)
    assert "more than 100000 bytes" in answers[0]["error"]
    assert sum(sent) < 64_000_000  # what sockets hold, and no more


def test_nobody_there():
    async def run():
        async with RetrievalClient(unused_address(), attempts=2, backoff=0.01) as client:
            return await client.search(["x"])

    (answer,) = asyncio.run(run())
    assert answer["status"] == "error" and "cannot be reached" in answer["error"]
    assert "given up after 2 attempts" in answer["error"]


def test_an_attempt_gets_half_of_what_is_left_and_the_last_all_of_it():
    server = Scripted("hang")
    answers, seconds = ask(server, deadline=0.8, attempts=3, backoff=0.0)
    # 0.4, then half of the other 0.4, then the remaining 0.2
    assert len(server.calls) == 3 and 0.75 < seconds < 1.2
    assert "did not answer within 0.2 s" in answers[0]["error"]


def test_a_hanging_server_that_recovers_is_answered_within_the_deadline():
    answers, seconds = ask(Scripted("hang", "ok"), deadline=0.6)
    assert answers[0]["status"] == "ok" and 0.3 <= seconds < 0.6


def test_pauses_double_with_full_jitter(monkeypatch):
    bounds = []
    monkeypatch.setattr(module.random, "uniform", lambda low, high: bounds.append((low, high)) or 0.0)
    ask(Scripted((503, {}, "")), attempts=5, backoff=0.5)
    assert bounds == [(0, 0.5), (0, 1.0), (0, 2.0), (0, 4.0), (0, 8.0)]


@pytest.mark.parametrize(("asked", "waits"), [("0.2", 0.2), ("0", 0.0)])
def test_a_server_that_names_a_wait_gets_it(asked, waits):
    server = Scripted((503, {"Retry-After": asked}, ""), "ok")
    answers, seconds = ask(server, backoff=0.0)
    assert answers[0]["status"] == "ok" and waits <= seconds < waits + 0.15


def test_a_wait_beyond_the_deadline_is_an_error_at_once():
    server = Scripted((503, {"Retry-After": "3600"}, "full"))
    answers, seconds = ask(server, deadline=5.0)
    assert len(server.calls) == 1 and seconds < 1 and "HTTP 503: full" in answers[0]["error"]


def test_requests_go_round_the_servers():
    one, two, three = Scripted(), Scripted(), Scripted()

    async def twelve(client):
        return [await client.search(["x"], 2) for _ in range(12)]

    ask(one, two, three, call=twelve)
    assert [len(server.calls) for server in (one, two, three)] == [4, 4, 4]


def test_a_failing_server_is_passed_over_for_a_while_and_asked_again_later(monkeypatch):
    bad, good = Scripted((503, {}, ""), "ok"), Scripted()
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.random, "uniform", pytest.fail)  # another server is there: nobody waits

    async def searches(client):
        first = [await client.search(["x"], 2) for _ in range(6)]
        seen = len(bad.calls)
        now[0] += module.REST + 1
        return [*first, *[await client.search(["x"], 2) for _ in range(4)]], seen

    (answers, seen), _ = ask(bad, good, call=searches)
    assert {a[0]["status"] for a in answers} == {"ok"}
    assert seen == 1 and len(bad.calls) == 3 and len(good.calls) == 8


def test_publishing_reaches_every_server_with_the_bytes_and_the_version():
    servers = Scripted(), Scripted((503, {}, "draining"), "drop", "ok")
    ask(*servers, call=lambda client: client.publish(b"tensors", 8))
    for server in servers:
        assert server.version == 8
        method, path, headers, body = server.calls[-1]
        assert (method, path, body) == ("POST", "/adapter?version=8", b"tensors")
        assert headers["Content-Type"] == "application/octet-stream"
    assert [len(server.calls) for server in servers] == [1, 3]


def test_a_training_that_begins_may_replace_what_was_there():
    server = Scripted()
    ask(server, call=lambda client: client.publish(b"tensors", 0, replace=True))
    assert server.calls[0][1] == "/adapter?version=0&replace=true"


def test_publishing_waits_until_the_version_is_served():
    async def accept(server, request, body):
        return web.json_response({"adapter_version": 7})

    slow = Scripted(accept, accept, accept, "ok", version=8)
    _, seconds = ask(slow, call=lambda client: client.publish(b"tensors", 8))
    assert [call[0] for call in slow.calls] == ["POST", "GET", "GET", "GET"] and seconds >= 3 * module.POLL
    never = Scripted(accept)
    with pytest.raises(RuntimeError, match=r"took version 8 but serves 7 after 0\.3 s"):
        ask(never, call=lambda client: client.publish(b"tensors", 8), deadline=0.3)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ((409, {}, '{"detail": "version 8 has other bytes"}'), r"HTTP 409: version 8 has other bytes$"),
        ((503, {}, "draining"), r"HTTP 503: draining \(given up after \d+ attempts within 0\.3 s\)"),
        ("hang", r"did not answer within .* within 0\.3 s"),
    ],
    ids=str,
)
def test_a_refused_publication_raises_with_the_servers_reason(script, reason):
    good, bad = Scripted(), Scripted(script)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=reason):
        ask(good, bad, call=lambda client: client.publish(b"tensors", 8), deadline=0.3)
    assert time.monotonic() - started < 1.5 and good.version == 8


@pytest.mark.parametrize(("adapter", "version"), [(b"", 1), ("text", 1), (b"x", -1), (b"x", True), (b"x", "1")])
def test_only_bytes_under_a_version_are_published(adapter, version):
    server = Scripted()
    with pytest.raises(ValueError, match="publish bytes under a version"):
        ask(server, call=lambda client: client.publish(adapter, version))
    assert server.calls == []


HEALTH = {"adapter_version": 3, "documents": 16, "dim": 8, "encoder": "minilm", "draining": False}


def test_health_of_every_server():
    ours = (200, {}, json.dumps(HEALTH))
    answers, _ = ask(Scripted(ours), Scripted(ours), call=lambda client: client.health())
    assert list(answers.values()) == [HEALTH] * 2


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ((404, {}, '{"detail": "Not Found"}'), r"is not a verl-bridge server .*Search-R1.*verl-bridge serve"),
        ((200, {}, '{"status": "ok"}'), r"is not a verl-bridge server .*adapter_version 'None'.*verl-bridge serve"),
        ((200, {}, json.dumps(HEALTH | {"draining": True})), r"is shutting down; start it with `verl-bridge serve`"),
        ((503, {}, "loading"), r"HTTP 503: loading.*start it with `verl-bridge serve`"),
    ],
    ids=str,
)
def test_health_of_something_else(script, reason):
    with pytest.raises(RuntimeError, match=reason):
        ask(Scripted(script), attempts=2, call=lambda client: client.health())


def test_versions_are_each_servers_own():
    answers, _ = ask(Scripted(version=3), Scripted(version=4), call=lambda client: client.versions())
    assert list(answers.values()) == [3, 4]


def test_one_client_in_several_event_loops():
    async def run():
        async with serving(Scripted()) as urls:
            client = RetrievalClient(urls)
            here = await client.search(["x"], 2)
            there = await asyncio.to_thread(client.search_sync, ["x"], 2)
            again = await client.search(["x"], 2)
            await client.close()
            return here == there == again == found(["x"], 2)["results"]

    assert asyncio.run(run())


def test_addresses():
    assert split_urls("http://a:1/, https://b/search-api ,http://a:1") == ["http://a:1", "https://b/search-api"]
    assert split_urls(["http://[::1]:8"]) == ["http://[::1]:8"]
    for bad in ("", "a:8000", "ftp://a", "http://", "http://a:x", "http://a:99999", "http://u:p@a", "http://a?x=1", []):
        with pytest.raises(ValueError, match=r"(invalid|no) server address.*: use http://HOST:PORT"):
            split_urls(bad)


@pytest.mark.parametrize(
    "settings", [{"token": ""}, {"token": " a"}, {"token": "é"}, {"token": "a\nb"}, {"deadline": 0}, {"attempts": 0}]
)
def test_settings_that_cannot_be_used(settings):
    with pytest.raises(ValueError, match=r"give another one|use positive numbers"):
        RetrievalClient("http://127.0.0.1:1", **settings)
