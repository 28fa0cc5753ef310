import asyncio
import os
import time
from functools import partial

import pytest
import torch

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.bilevel.updater import RetrieverUpdater
from verl_bridge.retrieval.actor import RetrieverService, get_retriever, start_retriever

PROBE = [("money of Hollin", ["Hollin crown"]), ("a town called Borsk", ["north"]), (" ", ["Borsk"])]


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
    service._batcher, service._arrived = None, asyncio.Event()
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
    encoder = service._retriever.encoder
    good = encoder.adapter_state()

    async def run():
        encoder.set_adapter_state({name: value * float("nan") for name, value in good.items()}, 0)
        failed = await asyncio.gather(service.search(["x"]), service.search(["y"]), return_exceptions=True)
        encoder.set_adapter_state(good, 0)
        return failed, await service.search(["x"])

    failed, fine = asyncio.run(run())
    assert all(isinstance(error, ValueError) and "not finite" in str(error) for error in failed)
    assert fine[0]["status"] == "ok"


def test_recall_probe_counts_aliases_in_shown_and_in_all_candidates(service):
    async def run():
        first = await service.recall_probe(PROBE, shown=1, top_k=2)
        deep = await service.recall_probe([("Hollin", ["Hollin crown"])], shown=1, top_k=2)
        return first, deep, (await service.search(["Hollin"]))[0]["ids"][:2], await service.documents(["Borsk-town"])

    first, deep, ids, documents = asyncio.run(run())
    # the money passage holds the alias; "north" is nowhere; a blank query finds nothing
    assert first == {"recall_shown": 1 / 3, "recall_top_k": 1 / 3, "n": 3.0, "adapter_version": 0.0}
    assert ids == ["Hollin-town", "Hollin-money"]
    assert deep["recall_shown"] == 0.0 and deep["recall_top_k"] == 1.0
    assert documents == [{"id": "Borsk-town", "title": "Borsk", "text": "Borsk is a town near a lake."}]
    with pytest.raises(ValueError, match="probe is empty"):
        asyncio.run(service.recall_probe([], shown=1))


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
    plain = RetrieverService(**{**settings, "updater": None})
    asyncio.run(service.save(str(tmp_path / "c")))

    async def run():
        for call in (plain.update(None), plain.save("x"), plain.load("x")):
            with pytest.raises(ValueError, match="serves only"):
                await call
        await plain.load_adapter(str(tmp_path / "c" / "adapter"), 5)
        await plain.save_adapter(str(tmp_path / "again"))
        return await plain.search(["Borsk"])

    assert asyncio.run(run())[0]["adapter_version"] == 5
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "c" / "adapter" / name).read_bytes()


def test_missing_parts_are_named_before_anything_starts(settings, tmp_path):
    for key in ("corpus", "index"):
        with pytest.raises(ValueError, match=rf"verl_bridge\.retriever\.{key}='/none' does not exist"):
            start_retriever("r", **{**settings, key: "/none"})
    for key in ("corpus", "index", "encoder"):
        with pytest.raises(ValueError, match=rf"verl_bridge\.retriever\.{key}=None is not set"):
            start_retriever("r", **{**settings, key: None})


def test_the_actor_serves_a_ray_job(settings, tmp_path):
    import ray

    own = not ray.is_initialized()
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    try:
        name = "retriever_under_test"
        with pytest.raises(RuntimeError, match=r"actor_name='retriever_under_test'.*start_retriever"):
            get_retriever(name)
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(RuntimeError, match=r"did not start: ValueError: corpus .* holds no documents"):
            start_retriever("broken", **{**settings, "corpus": str(tmp_path / "empty.jsonl")})
        handle = start_retriever(name, **settings)
        with pytest.raises(ValueError, match="is taken"):
            start_retriever(name, **settings)
        found = get_retriever(name)
        queries = ["money of Hollin", "money of Borsk"]
        (answers, more) = ray.get([found.search.remote(queries), found.search.remote(["Caldra"])])
        assert answers[0]["ids"][0] == "Hollin-money" and more[0]["documents"][0]["title"] == "Caldra"
        result = ray.get(handle.update.remote(batch_from(answers, queries, 0)))
        assert result.version == ray.get(found.version.remote()) == 1
        assert torch.isfinite(torch.tensor(list(result.metrics.values()))).all()
        assert ray.get(found.search.remote(queries))[0]["adapter_version"] == 1
        ray.kill(handle)
    finally:
        if own:
            ray.shutdown()
