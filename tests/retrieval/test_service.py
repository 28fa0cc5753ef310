import asyncio
import time
from functools import partial

import pytest

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.retrieval.batching import Busy
from verl_bridge.retrieval.service import RetrieverService


@pytest.fixture(scope="module")
def settings(places_file, places_index_folder, minilm):
    return {
        "corpus": str(places_file),
        "index": str(places_index_folder),
        "encoder": minilm,
        "top_k": 4,
        "updater": partial(RetrieverUpdater, lr=1e-2),
    }


@pytest.fixture(scope="module")
def started(settings, tmp_path_factory):
    service = RetrieverService(**settings)
    start = str(tmp_path_factory.mktemp("start") / "checkpoint")
    asyncio.run(service.save(start))
    return service, start


@pytest.fixture
def service(started):
    """The service at version 0; each test runs an event loop of its own."""
    service, start = started
    asyncio.run(service.load(start))
    return service


def batch_from(answers, queries, version):
    ids = [answer["ids"] for answer in answers]
    likelihood = [[-6.0] * (len(row) - 1) + [-1.0] for row in ids]  # the last candidate answers the question
    count = len(queries)
    return RetrieverBatch(queries, ids, likelihood, [1.0] * count, [True] * count, [version] * count)


def test_thirty_two_callers_get_their_own_answers_in_few_batches_and_less_than_serial_time(service, monkeypatch):
    queries = [f"what do people in place number {i} pay with?" for i in range(32)]
    sizes = []
    original = service._retriever.search
    monkeypatch.setattr(service._retriever, "search", lambda q, k=None: sizes.append(len(q)) or original(q, k))

    async def run():
        started = time.perf_counter()
        serial = [await service.search([query]) for query in queries]
        middle = time.perf_counter()
        together = await asyncio.gather(*(service.search([query]) for query in queries))
        return serial, together, middle - started, time.perf_counter() - middle

    serial, together, serial_seconds, seconds = asyncio.run(run())
    assert sizes[:32] == [1] * 32 and sum(sizes[32:]) == 32 and len(sizes[32:]) <= 3
    assert seconds < serial_seconds
    for (alone,), (answer,) in zip(serial, together, strict=True):
        assert answer["ids"] == alone["ids"] and answer["scores"] == pytest.approx(alone["scores"], abs=1e-5)
    assert len({tuple(answer["scores"]) for (answer,) in together}) == 32


def test_depths_blank_queries_and_bad_calls_do_not_touch_other_callers(service):
    async def run():
        return await asyncio.gather(
            service.search(["Avelin", ""], 2),
            service.search(["Borsk"], 7),
            service.search([]),
            service.search(["Caldra"], 0),
            service.search(["Dunmoor"]),
            *(service.search(["Caldra"], top_k) for top_k in (True, 2.0, "2")),
            *(service.search(queries) for queries in (None, "Caldra", [None])),
            return_exceptions=True,
        )

    two, seven, none, bad, default, *refused = asyncio.run(run())
    assert [type(error) for error in refused] == [ValueError] * 6
    assert [len(answer["ids"]) for answer in two] == [2, 0] and [a["status"] for a in two] == ["ok", "error"]
    assert len(seven[0]["ids"]) == 7 and none == [] and len(default[0]["ids"]) == 4
    assert isinstance(bad, ValueError) and "top_k is 0" in str(bad)
    assert two[0]["documents"][0]["title"] == "Avelin" and seven[0]["documents"][0]["title"] == "Borsk"


def test_searches_around_an_update_are_from_exactly_one_version(service):
    queries = [f"money of place {i}" for i in range(6)]

    async def run():
        old = await service.search(queries)
        batch = batch_from(old, queries, 0)

        async def later(delay):
            await asyncio.sleep(delay)
            return await service.search(queries)

        searches = [asyncio.create_task(later(0.01 * i)) for i in range(30)]
        await asyncio.sleep(0.05)
        result = await service.update(batch)
        during = await asyncio.gather(*searches)
        return old, during, await service.search(queries), result, await service.version()

    old, during, new, result, version = asyncio.run(run())
    assert result.version == version == 1 and {a["adapter_version"] for a in old} == {0}
    expected = {0: old, 1: new}
    assert abs(old[0]["scores"][0] - new[0]["scores"][0]) > 1e-3
    for answers in during:
        (served,) = {answer["adapter_version"] for answer in answers}
        for answer, right in zip(answers, expected[served], strict=True):
            assert answer["ids"] == right["ids"] and answer["scores"] == pytest.approx(right["scores"], abs=1e-5)
    assert {answers[0]["adapter_version"] for answers in during} == {0, 1}


def test_failure_in_the_model_reaches_the_caller_and_the_service_lives_on(service):
    encoder = service._retriever.encoder.queries
    good = encoder.adapter_state()

    async def run():
        encoder.set_adapter_state({name: value * float("nan") for name, value in good.items()}, 0)
        failed = await asyncio.gather(service.search(["x"]), service.search(["y"]), return_exceptions=True)
        encoder.set_adapter_state(good, 0)
        return failed, await service.search(["x"])

    failed, fine = asyncio.run(run())
    assert all(isinstance(error, ValueError) and "not finite" in str(error) for error in failed)
    assert fine[0]["status"] == "ok"


def test_a_call_larger_than_a_batch_is_encoded_in_parts_and_answered_whole(settings, monkeypatch):
    service = RetrieverService(**{**settings, "updater": None}, max_batch=8)
    sizes, original = [], service._retriever.search
    monkeypatch.setattr(service._retriever, "search", lambda q, k=None: sizes.append(len(q)) or original(q, k))
    queries = [f"money of place number {i}" for i in range(20)]
    answers = asyncio.run(service.search(queries))
    assert sizes == [8, 8, 4]
    for query, answer in list(zip(queries, answers, strict=True))[::6]:
        (alone,) = asyncio.run(service.search([query]))
        assert answer["ids"] == alone["ids"] and answer["scores"] == pytest.approx(alone["scores"], abs=1e-5)


def test_a_full_queue_refuses_a_call_and_a_drained_service_all(settings):
    service = RetrieverService(**{**settings, "updater": None}, max_queue=4, max_wait=5)

    async def run():
        waiting = asyncio.create_task(service.search(["Borsk"] * 3))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="max_queue=4"):
            await service.search(["Avelin"] * 2)
        await service.drain()
        assert waiting.done()
        with pytest.raises(Busy, match="shutting down"):
            await service.search(["Avelin"])
        return await waiting, await service.version()  # what is no search still runs

    answers, version = asyncio.run(run())
    assert [answer["status"] for answer in answers] == ["ok"] * 3 and version == 0


def test_the_adapter_s_digest_follows_every_change(service):
    queries = ["money of Hollin"]

    async def run():
        seen = [await service.adapter()]
        await service.publish(service._retriever.encoder.queries.adapter_bytes(), 0)
        answers = await service.search(queries)
        await service.update(batch_from(answers, queries, 0))
        seen.append(await service.adapter())
        await service.publish((await service.adapter_bytes())[1], 9)
        seen.append(await service.adapter())
        return seen

    (zero, first), (one, second), (nine, third) = asyncio.run(run())
    assert (zero, one, nine) == (0, 1, 9) and first != second and second == third


def test_documents_by_id(service):
    documents = asyncio.run(service.documents(["Borsk-town"]))
    assert documents == [{"id": "Borsk-town", "title": "Borsk", "text": "Borsk is a town near a lake."}]
    with pytest.raises(KeyError, match="nowhere"):
        asyncio.run(service.documents(["nowhere"]))


def test_save_and_load_bring_back_adapter_and_version(service, tmp_path):
    queries = ["money of Hollin", "money of Borsk"]

    async def run():
        answers = await service.search(queries)
        await service.update(batch_from(answers, queries, 0))
        one = await service.search(queries)
        await service.save(str(tmp_path / "one"))
        await service.update(batch_from(one, queries, 1))
        two = await service.search(queries)
        await service.load(str(tmp_path / "one"))
        return one, two, await service.search(queries), await service.version()

    one, two, back, version = asyncio.run(run())
    assert version == 1 and back == one and two[0]["adapter_version"] == 2 and two[0]["scores"] != one[0]["scores"]


def test_a_retriever_without_learner_serves_only(settings, service, tmp_path):
    name = "adapter_model.safetensors"
    plain = RetrieverService(**{**settings, "updater": None})
    asyncio.run(service.save(str(tmp_path / "c")))

    async def run():
        for call in (plain.update(None), plain.save("x"), plain.load("x"), plain.known_versions()):
            with pytest.raises(ValueError, match="serves only"):
                await call
        await plain.publish((tmp_path / "c" / "adapter" / name).read_bytes(), 5)
        await plain.save_adapter(str(tmp_path / "again"))
        return await plain.search(["Borsk"])

    assert asyncio.run(run())[0]["adapter_version"] == 5
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "c" / "adapter" / name).read_bytes()
