import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest

from verl_bridge.qa.actions import CORRECTION, RETRIEVAL_FAILED
from verl_bridge.retrieval.server import create_app
from verl_bridge.retrieval.service import RetrieverService

POSTS = ("/search", "/retrieve", "/get_observation")


@pytest.fixture(scope="module")
def service(places_file, places_index_folder, minilm):
    return RetrieverService(corpus=str(places_file), index=str(places_index_folder), encoder=minilm, top_k=4)


@pytest.fixture(scope="module")
def app(service):
    return create_app(service, max_queries=8, max_query_characters=200, max_top_k=50, max_body=20_000)


@asynccontextmanager
async def client(app, **headers):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as opened:
        yield opened


def ask(app, method, path, **request):
    """One request, and another that shows that the server lives."""

    async def run():
        async with client(app) as opened:
            answer = await opened.request(method, path, **request)
            health = await opened.get("/health")
            assert health.status_code == 200 and health.json()["status"] == "ok"
            return answer

    return asyncio.run(run())


def test_search_r1_s_call_is_answered_in_its_form_with_and_without_scores(app, service):
    queries = ["money of Hollin", "a town called Borsk"]
    found = asyncio.run(service.search(queries, 2))
    expected = [
        [
            {"document": {"id": d["id"], "contents": f"{d['title']}\n{d['text']}"}, "score": score}
            for d, score in zip(answer["documents"], answer["scores"], strict=True)
        ]
        for answer in found
    ]
    scored = ask(app, "POST", "/retrieve", json={"queries": queries, "topk": 2, "return_scores": True}).json()
    assert scored["result"][0][0]["document"]["id"] == "Hollin-money" and list(scored) == ["result"]
    for row, right in zip(scored["result"], expected, strict=True):
        assert [p["document"] for p in row] == [p["document"] for p in right]
        assert [p["score"] for p in row] == pytest.approx([p["score"] for p in right], abs=1e-5)
    plain = ask(app, "POST", "/retrieve", json={"queries": queries, "topk": 2, "return_scores": False}).json()
    assert plain == {"result": [[p["document"] for p in row] for row in expected]}
    default = ask(app, "POST", "/retrieve", json={"queries": queries}).json()["result"]
    assert [len(row) for row in default] == [3, 3] and default[0][:2] == plain["result"][0]


def test_one_blank_query_fails_no_other(app):
    queries = ["money of Hollin", " ", "Borsk"]
    rows = ask(app, "POST", "/retrieve", json={"queries": queries, "topk": 3, "return_scores": True}).json()["result"]
    assert [len(row) for row in rows] == [3, 0, 3]
    answer = ask(app, "POST", "/search", json={"queries": queries, "top_k": 3}).json()
    assert [r["status"] for r in answer["results"]] == ["ok", "error", "ok"]
    assert answer["results"][1]["error"] == "the query is empty" and answer["results"][1]["documents"] == []
    # Search-R1 asks with an empty list in every turn in which no rollout searches
    assert ask(app, "POST", "/retrieve", json={"queries": [], "topk": 3, "return_scores": True}).json() == {
        "result": []
    }
    for path, key in (("/search", "top_k"), ("/retrieve", "topk")):
        refused = ask(app, "POST", path, json={"queries": ["", "\n"], key: 3})
        assert refused.status_code == 422 and "blank" in refused.json()["detail"]


def test_search_says_everything_the_service_knows(app, service):
    queries = ["money of Hollin", "🙂 שלום", "a\0b"]
    answer = ask(app, "POST", "/search", json={"queries": queries}).json()
    assert answer["adapter_version"] == 0 and len(answer["results"]) == 3
    for result, right in zip(answer["results"], asyncio.run(service.search(queries)), strict=True):
        assert result["scores"] == pytest.approx(right["scores"], abs=1e-5)
        assert {**result, "scores": right["scores"]} == right
    assert [len(r["ids"]) for r in answer["results"]] == [4, 4, 4]
    everything = ask(app, "POST", "/search", json={"queries": ["x"], "top_k": 50}).json()["results"][0]
    assert len(set(everything["ids"])) == 16  # more were asked for than there are


def test_verl_tool_s_call(app):
    turns = [
        "<search>money of Hollin</search>",
        "<answer>crown</answer>",
        "I am lost",
        "",
        "<search>" + "x" * 201 + "</search>",
    ]
    body = {
        "trajectory_ids": ["a", "b", "c", "d", "e"],
        "actions": turns,
        "finish": [False, False, False, True, False],
        "is_last_step": [False] * 5,
        "extra_fields": [{"index": i} for i in range(5)],
    }
    answer = ask(app, "POST", "/get_observation", json=body).json()
    assert answer["dones"] == [False, True, False, True, False] and answer["valids"] == [
        True,
        False,
        False,
        True,
        False,
    ]
    searched, answered, lost, goodbye, long = answer["observations"]
    assert searched["obs"].startswith("\n\n<information>Doc 1(Title: Hollin) People in Hollin pay")
    assert searched["obs"].count("Doc ") == searched["shown"] == 3 and searched["adapter_version"] == 0
    assert len(searched["ids"]) == len(searched["scores"]) == len(searched["candidates"]) == 4
    assert (answered["obs"], lost["obs"], goodbye["obs"]) == ("", CORRECTION, "")
    assert (long["obs"], long["status"], long["error"]) == (RETRIEVAL_FAILED, "error", "the query is too long")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"", "application/json", 400),
        (b"{", "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b"[" * 5000, "application/json", 400),
        (b'{"queries": ["\\ud800"], "actions": ["\\udfff"]}', "application/json", 400),
        (b'{"queries": ["x"], "top_k": NaN}', "application/json", 400),
        (b"null", "application/json", 422),
        (b"{}", "application/json", 422),
        (b'{"queries": "x", "actions": 1}', "application/json", 422),
        (b'{"queries": ["x"], "top_k": 0, "topk": 0}', "application/json", 422),
        (b'{"queries": ["x"], "top_k": -1, "topk": -1}', "application/json", 422),
        (b'{"queries": ["x"], "top_k": 1000000000, "topk": 1000000000}', "application/json", 422),
        (b'{"queries": ["x"], "top_k": "3", "topk": true}', "application/json", 422),
        (b'{"queries": ["' + b"x" * 201 + b'"]}', "application/json", 422),
        (b'{"queries": [' + b'"x",' * 8 + b'"x"]}', "application/json", 422),
        (b'{"queries": ["' + b"x" * 100_000 + b'"]}', "application/json", 413),
        (b'{"queries": ["x"]}', "text/plain", 415),
        (b"queries=x", "application/x-www-form-urlencoded", 415),
        (b'{"queries": ["x"]}', "", 415),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_input_is_refused_with_a_short_reason(app, path, content, kind, status):
    answer = ask(app, "POST", path, content=content, headers={"content-type": kind})
    assert answer.status_code == status and answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["detail"] and 0 < len(answer.json()["detail"]) <= 300


def test_a_body_without_a_length_is_read_no_further_than_the_limit(app):
    sent = []

    async def body():
        for _ in range(100):
            sent.append(b'{"queries": ["xxxxxxxx"' + b" " * 1000)
            yield sent[-1]

    async def run():
        async with client(app) as opened:
            return await opened.post("/search", content=body(), headers={"content-type": "application/json"})

    answer = asyncio.run(run())
    assert answer.status_code == 413 and "larger than 20000 bytes" in answer.json()["detail"]
    assert sum(map(len, sent)) < 22_000  # of 100,000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/none", 404),
        ("POST", "/", 404),
        ("GET", "/search", 405),
        ("PUT", "/adapter", 405),
        ("GET", "/docs", 404),
    ],
)
def test_unknown_paths_and_methods(app, method, path, status):
    answer = ask(app, method, path)
    assert answer.status_code == status and list(answer.json()) == ["detail"]


def test_a_full_queue_and_a_draining_server_say_when_to_come_back(places_file, places_index_folder, minilm):
    service = RetrieverService(
        corpus=str(places_file), index=str(places_index_folder), encoder=minilm, max_queue=8, max_batch=8, max_wait=5
    )
    app = create_app(service, max_queries=8)

    async def run():
        async with client(app) as opened:
            waiting = asyncio.create_task(opened.post("/search", json={"queries": ["x"] * 5}))
            while service.queue.queued != 5:
                await asyncio.sleep(0)
            full = await opened.post("/retrieve", json={"queries": ["x"] * 4, "topk": 1})
            draining = asyncio.create_task(service.drain())
            await asyncio.sleep(0)
            late = [await opened.post(path, json=body) for path, body in bodies.items()]
            health = (await opened.get("/health")).json()
            await draining
            return await waiting, full, late, health

    bodies = {
        "/search": {"queries": ["x"]},
        "/retrieve": {"queries": ["x"]},
        "/get_observation": {"trajectory_ids": ["1"], "actions": ["<search>x</search>"]},
    }
    answered, full, late, health = asyncio.run(run())
    assert answered.status_code == 200 and len(answered.json()["results"]) == 5
    for answer in (full, *late):
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert "max_queue=8" in full.json()["detail"] and "shutting down" in late[0].json()["detail"]
    assert health["status"] == "draining" and health["draining"] is True


def test_a_client_that_hangs_up_frees_its_place_and_costs_no_work(places_file, places_index_folder, minilm):
    service = RetrieverService(corpus=str(places_file), index=str(places_index_folder), encoder=minilm, max_wait=30)
    app = create_app(service)
    batches = []
    body = json.dumps({"queries": ["gone"]}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/search",
        "raw_path": b"/search",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
    }

    async def run():
        service.queue.on_batch = batches.append
        messages, sent = asyncio.Queue(), []
        await messages.put({"type": "http.request", "body": body, "more_body": False})

        async def send(message):
            sent.append(message)

        request = asyncio.create_task(app(scope, messages.get, send))
        while service.queue.queued != 1:
            await asyncio.sleep(0)
        await messages.put({"type": "http.disconnect"})
        await request
        await service.drain()
        return sent[0]["status"]

    assert asyncio.run(run()) == 499 and batches == [] and service.queue.queued == 0


def test_a_broken_model_gives_a_reason_and_to_the_policy_an_error_observation(app, service):
    encoder = service._retriever.encoder.queries
    good = encoder.adapter_state()
    encoder.set_adapter_state({name: value * float("nan") for name, value in good.items()}, 0)
    try:
        failed = [ask(app, "POST", path, json={"queries": ["x"]}) for path in ("/search", "/retrieve")]
        call = {"trajectory_ids": ["1", "2"], "actions": ["<search>x</search>", "<answer>y</answer>"]}
        observed = ask(app, "POST", "/get_observation", json=call)
    finally:
        encoder.set_adapter_state(good, 0)
    for answer in failed:
        assert answer.status_code == 500 and answer.json()["detail"].startswith("the retriever failed: ")
        assert "not finite" in answer.json()["detail"]
    assert observed.status_code == 200 and observed.json()["valids"] == [False, False]
    assert observed.json()["dones"] == [False, True]
    assert observed.json()["observations"][0]["obs"] == RETRIEVAL_FAILED
    assert ask(app, "POST", "/search", json={"queries": ["x"]}).status_code == 200


def test_the_token_is_asked_for_everywhere_but_at_health(service):
    app = create_app(service, token="s3cret")

    async def run():
        async with client(app) as opened:
            refused = []
            for given in (None, "Bearer wrong", "Bearer s3cret ", "bearer s3cret", "Basic s3cret", "s3cret"):
                headers = {} if given is None else {"authorization": given}
                refused += [await opened.post(path, json={"queries": ["x"]}, headers=headers) for path in POSTS]
                refused += [await opened.get(p, headers=headers) for p in ("/adapter", "/metrics", "/openapi.json")]
            twice = [("authorization", "Bearer s3cret"), ("authorization", "Bearer s3cret")]
            refused.append(await opened.get("/adapter", headers=twice))
            right = {"authorization": "Bearer s3cret"}
            answer = await opened.post("/search", json={"queries": ["x"]}, headers=right)
            return (
                refused,
                answer,
                await opened.get("/health"),
                (await opened.get("/openapi.json", headers=right)).json(),
            )

    refused, answer, health, description = asyncio.run(run())
    assert {r.status_code for r in refused} == {401} and {r.headers["www-authenticate"] for r in refused} == {"Bearer"}
    assert answer.status_code == health.status_code == 200
    assert description["paths"]["/search"]["post"]["security"] == [{"bearer": []}]
    assert "401" in description["paths"]["/search"]["post"]["responses"]
    assert description["paths"]["/health"]["get"]["security"] == []


def test_health_and_metrics(service):
    app = create_app(service)

    async def run():
        async with client(app) as opened:
            before = await service.version()
            await opened.post("/search", json={"queries": ["x", "y", " "]})
            await opened.post("/search", json={})
            await opened.get("/../../etc/passwd")
            return before, (await opened.get("/health")).json(), await opened.get("/metrics")

    version, health, metrics = asyncio.run(run())
    uptime = health.pop("uptime_seconds")
    assert uptime > 0 and health == {
        "status": "ok",
        "draining": False,
        "adapter_version": version,
        "documents": 16,
        "dim": 384,
        "encoder": service.describe()["encoder"],
    }
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = metrics.text.splitlines()
    assert 'verl_bridge_requests_total{endpoint="/search",status="200"} 1.0' in lines
    assert 'verl_bridge_requests_total{endpoint="/search",status="422"} 1.0' in lines
    assert 'verl_bridge_requests_total{endpoint="other",status="404"} 1.0' in lines
    assert 'verl_bridge_request_seconds_count{endpoint="/search"} 2.0' in lines
    assert "verl_bridge_batch_queries_sum 3.0" in lines and "verl_bridge_failed_queries_total 1.0" in lines
    assert "verl_bridge_queue_queries 0.0" in lines and f"verl_bridge_adapter_version {float(version)}" in lines


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"shown": 5}, "shown=5, top_k=4"),
        ({"shown": 0}, "shown=0"),
        ({"max_top_k": 3}, "max_top_k=3"),
        ({"max_queries": 9000}, "max_queries=9000 would never fit max_queue=8192"),
        ({"token": " "}, "token is empty"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(service, limits, reason):
    with pytest.raises(ValueError, match=reason):
        create_app(service, **limits)
