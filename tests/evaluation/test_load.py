import asyncio
import threading

import pytest
from aiohttp import web

from verl_bridge.evaluation.load import Answer, Load, drive


@pytest.fixture
def server():
    """Counts who asks at the same time; every fifth body is refused."""
    seen = {"now": 0, "most": 0, "bodies": []}

    async def answer(request):
        seen["now"] += 1
        seen["most"] = max(seen["most"], seen["now"])
        body = await request.text()
        seen["bodies"].append(body)
        await asyncio.sleep(0.005)
        seen["now"] -= 1
        return web.Response(text=f"got {body}", status=503 if body == "4" else 200)

    started, address, loop = threading.Event(), [], asyncio.new_event_loop()

    async def start():
        app = web.Application()
        app.router.add_post("/x", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(site._server.sockets[0].getsockname()[1])
        started.set()

    loop.create_task(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert started.wait(10)
    yield f"http://127.0.0.1:{address[0]}/x", seen
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_every_body_is_asked_in_turn_by_so_many_clients(server):
    url, seen = server
    called = []
    load = drive(
        url,
        [str(i).encode() for i in range(5)],
        requests=52,
        clients=4,
        keep_bodies=True,
        meanwhile=lambda: called.append(1),
    )
    assert called == [1] and seen["most"] == 4
    assert sorted(seen["bodies"]) == sorted(str(i % 5) for i in range(52))
    assert len(load.answers) == 52 and load.failed == 10  # 4, 9, …, 49
    for answer in load.answers:
        assert answer.body == f"got {answer.request}".encode()
        assert answer.status == (503 if answer.request == 4 else 200)
    summary = load.summary()
    assert summary["requests_per_second"] == pytest.approx(52 / load.seconds)
    assert 5 <= summary["p50_ms"] <= summary["p95_ms"] <= summary["p99_ms"]


def test_a_server_that_is_not_there_is_a_failure_not_an_error():
    load = drive("http://127.0.0.1:9/x", [b"1"], requests=3, clients=2)
    assert load.failed == 3 and {answer.status for answer in load.answers} == {0}


def test_percentiles_by_hand():
    answers = [Answer(0, 200, 0.0, milliseconds / 1000, b"") for milliseconds in range(101)]
    summary = Load(2.0, answers).summary()
    assert (summary["p50_ms"], summary["p95_ms"], summary["p99_ms"]) == pytest.approx((50, 95, 99))
    assert summary["requests_per_second"] == 50.5 and summary["failed"] == 0
