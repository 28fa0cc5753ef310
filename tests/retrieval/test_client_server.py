"""The client against the real server: MiniLM over HTTP on loopback."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
import uvicorn

from verl_bridge.retrieval.client import RetrievalClient
from verl_bridge.retrieval.server import create_app
from verl_bridge.retrieval.service import RetrieverService

QUERIES = ["money of Hollin", " ", "ein \ud800 See \x00 nahe 🏞 بحيرة"]


@pytest.fixture(scope="module")
def settings(places_file, places_index_folder, minilm):
    return {"corpus": str(places_file), "index": str(places_index_folder), "encoder": minilm, "top_k": 4}


@pytest.fixture(scope="module")
def service(settings):
    return RetrieverService(**settings)


@asynccontextmanager
async def client_of(*services, token=None, limits=None, **changes):
    """A client of one server per service."""
    servers = []
    for service in services:
        config = uvicorn.Config(
            create_app(service, token=token, **(limits or {})), port=0, log_level="error", lifespan="off"
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        servers.append(server)
    urls = [f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}" for server in servers]
    try:
        async with RetrievalClient(urls, **{"token": token, **changes}) as client:
            yield client
    finally:
        for server in servers:
            await server.shutdown()


def test_a_search_over_the_network_is_the_search_itself(service):
    async def run():
        async with client_of(service) as client:
            return await client.search(QUERIES, 3), await service.search(QUERIES, 3), await client.search(["Borsk"])

    over, direct, default = asyncio.run(run())
    assert [a["status"] for a in over] == ["ok", "error", "ok"] and over[1]["error"] == "the query is empty"
    for answer, right in zip(over, direct, strict=True):
        assert answer["scores"] == pytest.approx(right["scores"], abs=1e-5)
        assert {**answer, "scores": None} == {**right, "scores": None}
    assert over[0]["ids"][0] == "Hollin-money" and len(over[0]["ids"]) == 3 and len(default[0]["ids"]) == 4


def test_what_the_server_refuses_is_an_error_with_its_reason(service):
    async def run():
        async with client_of(service) as client:
            return await client.search(["x"], 100_000), await client.search(["x" * 100_000]), await client.search([" "])

    deep, long, blank = asyncio.run(run())
    for (answer,), reason in ((deep, "top_k"), (long, "queries"), (blank, "blank")):
        assert answer["status"] == "error" and "HTTP 422" in answer["error"] and reason in answer["error"]


def test_health_needs_no_token_and_everything_else_does(service):
    async def run():
        async with client_of(service, token="secret") as client:
            allowed = await client.search(["Borsk"])
            async with RetrievalClient(client.urls, token="other") as stranger:
                return allowed, await stranger.health(), await stranger.search(["Borsk"]), client.urls

    (allowed,), states, (refused,), (url,) = asyncio.run(run())
    assert allowed["status"] == "ok" and refused["status"] == "error" and "HTTP 401" in refused["error"]
    assert (states[url]["documents"], states[url]["dim"], states[url]["adapter_version"]) == (16, 384, 0)


def test_a_published_adapter_answers_the_next_search_of_every_server(settings, encoders):
    encoder, _ = encoders
    torch.manual_seed(0)
    changed = {name: value + 0.05 * torch.randn_like(value) for name, value in encoder.adapter_state().items()}
    encoder.set_adapter_state(changed, 1)
    adapter = encoder.adapter_bytes()

    async def run():
        async with client_of(RetrieverService(**settings), RetrieverService(**settings), deadline=20.0) as client:
            before = [await client.search(["Borsk"]) for _ in range(2)]
            await client.publish(adapter, 1)
            after = [await client.search(["Borsk"]) for _ in range(2)]
            await client.publish(adapter, 1)  # again changes nothing
            for bad, version, reason in ((b"no tensors", 2, "HTTP 422"), (adapter[:-4], 2, "HTTP 422")):
                with pytest.raises(RuntimeError, match=reason):
                    await client.publish(bad, version)
            return before, after, await client.versions()

    before, after, versions = asyncio.run(run())
    assert {a["adapter_version"] for (a,) in before} == {0} and {a["adapter_version"] for (a,) in after} == {1}
    assert abs(before[0][0]["scores"][0] - after[0][0]["scores"][0]) > 1e-3
    assert list(versions.values()) == [1, 1]


def test_a_full_queue_is_waited_for(settings):
    """Sixteen callers at a server that lets four queries wait: all are answered, some after being turned away."""
    service = RetrieverService(**settings, max_queue=4, max_batch=4)
    turned_away = []
    submit = service.submit

    def counted(*arguments):
        try:
            return submit(*arguments)
        except Exception as error:
            turned_away.append(error)
            raise

    service.submit = counted

    async def run():
        async with client_of(service, limits={"max_queries": 4}, attempts=20, backoff=0.1) as client:
            return await asyncio.gather(*(client.search([f"money of place {i}"]) for i in range(16)))

    answers = asyncio.run(run())
    assert {answer["status"] for (answer,) in answers} == {"ok"} and turned_away


def test_a_training_that_begins_takes_a_server_over(settings, encoders):
    """Every training begins at version 0, whose tensors follow from its seed: a server has others under that number."""
    encoder, _ = encoders
    changed = {name: value + 0.05 for name, value in encoder.adapter_state().items()}
    encoder.set_adapter_state(changed, 0)
    adapter, service = encoder.adapter_bytes(), RetrieverService(**settings)

    async def run():
        async with client_of(service) as client:
            before = await client.search(["Borsk"])
            with pytest.raises(RuntimeError, match="HTTP 409"):
                await client.publish(adapter, 0)
            assert (await client.search(["Borsk"]))[0]["scores"] == pytest.approx(before[0]["scores"], abs=1e-5)
            await client.publish(adapter, 0, replace=True)
            after = await client.search(["Borsk"])
            assert abs(after[0]["scores"][0] - before[0]["scores"][0]) > 1e-3
            await client.publish(adapter, 0)  # the one that is known now
            return after[0]["adapter_version"], await service.adapter_bytes()

    assert asyncio.run(run()) == (0, (0, adapter))
