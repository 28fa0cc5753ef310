"""Publishing adapters: over HTTP, and in between the searches of many callers."""

import asyncio
import hashlib

import httpx
import pytest
import torch

from verl_bridge.retrieval.server import create_app
from verl_bridge.retrieval.service import RetrieverService, VersionConflict

QUERIES = [f"what do people in place number {i} pay with?" for i in range(12)]


@pytest.fixture
def made(encoders):
    """Makes adapters that change the answers: bytes by number."""
    encoder, _ = encoders
    initial = encoder.adapter_state()

    def make(number):
        torch.manual_seed(number)
        state = {name: torch.randn_like(value) * 0.02 for name, value in initial.items()}
        encoder.set_adapter_state(state, number)
        return encoder.adapter_bytes()

    return make


@pytest.fixture(scope="module")
def settings(places_file, places_index_folder, minilm):
    return {"corpus": str(places_file), "index": str(places_index_folder), "encoder": minilm, "top_k": 4}


@pytest.fixture
def service(settings):
    return RetrieverService(**settings)


def post(app, data, version, kind="application/octet-stream", query="version={}"):
    async def run():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            path = f"/adapter?{query.format(version)}"
            answer = await client.post(path, content=data, headers={"content-type": kind})
            return answer, (await client.get("/adapter")).json()

    return asyncio.run(run())


def test_a_published_adapter_serves_and_a_retry_changes_nothing(service, made):
    app, one = create_app(service), made(1)
    digest = hashlib.sha256(one).hexdigest()
    before = asyncio.run(service.search(QUERIES))
    for _ in range(2):
        answer, state = post(app, one, 7)
        assert answer.status_code == 200 and answer.json() == {"adapter_version": 7}
        assert state == {"adapter_version": 7, "sha256": digest}
    after = asyncio.run(service.search(QUERIES))
    assert {a["adapter_version"] for a in after} == {7} and after[0]["scores"] != before[0]["scores"]


def test_other_bytes_under_a_version_are_a_conflict_until_it_is_rolled_back(service, made):
    app, one, two, three = create_app(service), made(1), made(2), made(3)
    initial = service._retriever.encoder.queries.adapter_bytes()
    conflict, state = post(app, one, 0)  # version 0 is the frozen encoder's
    assert conflict.status_code == 409 and state["adapter_version"] == 0
    assert post(app, initial, 0)[0].status_code == 200
    assert post(app, one, 1)[0].status_code == post(app, two, 2)[0].status_code == 200
    conflict, state = post(app, three, 2)
    assert conflict.status_code == 409 and "version 2 was published with other bytes" in conflict.json()["detail"]
    assert state == {"adapter_version": 2, "sha256": hashlib.sha256(two).hexdigest()}
    assert post(app, three, 1)[0].status_code == 409  # an earlier one is remembered as well
    # a training that resumes at 1 makes a 2 of its own
    answer, state = post(app, one, 1)
    assert answer.status_code == 200 and state == {"adapter_version": 1, "sha256": hashlib.sha256(one).hexdigest()}
    answer, state = post(app, three, 2)
    assert answer.status_code == 200 and state["sha256"] == hashlib.sha256(three).hexdigest()


def test_what_is_no_fitting_adapter_is_refused_and_the_old_one_serves_on(service, settings, made):
    app, one = create_app(service), made(1)
    assert post(app, one, 1)[0].status_code == 200
    before = asyncio.run(service.search(QUERIES))
    other_rank = RetrieverService(**settings, lora_rank=4)._retriever.encoder.queries.adapter_bytes()
    pickled = b"\x80\x04cos\nsystem\n(S'false'\ntR."
    cases = [
        (b"", 422),
        (b"garbage", 422),
        (pickled, 422),
        (one[:-1], 422),
        (one[: len(one) // 2], 422),
        (b"\xff" * 8 + one[8:], 422),
        (other_rank, 422),
        (one + bytes(len(one) + (1 << 17)), 413),
    ]
    for data, status in cases:
        answer, state = post(app, data, 2)
        assert answer.status_code == status, data[:20]
        assert 0 < len(answer.json()["detail"]) <= 300
        assert state == {"adapter_version": 1, "sha256": hashlib.sha256(one).hexdigest()}
    assert asyncio.run(service.search(QUERIES)) == before


def test_a_version_is_one_whole_number(service):
    app = create_app(service)
    wrong = "", "-1", "1.0", "one", "%201", "1&version=1", "١", "99999999999999999", "9007199254740992", "1e3", "true"
    for query in ["", "v=1", *(f"version={value}" for value in wrong)]:
        answer, state = post(app, b"x", 0, query=query)
        assert answer.status_code == 422 and "version: give one whole number" in answer.json()["detail"], query
        assert state["adapter_version"] == 0


def test_the_content_type_has_to_be_right(service, made):
    answer, _ = post(create_app(service), made(1), 1, kind="application/x-pickle")
    assert answer.status_code == 415 and "application/octet-stream" in answer.json()["detail"]


def test_a_server_may_start_with_a_saved_adapter(settings, encoders, made, tmp_path):
    data = made(5)
    encoders[0].save_adapter(tmp_path / "adapter")
    service = RetrieverService(**settings, adapter=str(tmp_path / "adapter"), adapter_version=12)
    saved = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    assert asyncio.run(service.adapter()) == (12, hashlib.sha256(saved).hexdigest())
    plain = RetrieverService(**settings)
    asyncio.run(plain.publish(data, 12))
    assert asyncio.run(service.search(QUERIES)) == asyncio.run(plain.search(QUERIES))
    with pytest.raises(ValueError, match="no adapter at"):
        RetrieverService(**settings, adapter=str(tmp_path / "none"))


def test_swaps_under_load_fail_no_search_and_mix_no_versions(service, made):
    adapters = {version: made(version) for version in (1, 2, 3)}
    initial = service._retriever.encoder.queries.adapter_bytes()
    expected, waits = {0: asyncio.run(service.search(QUERIES))}, []
    for version, data in adapters.items():
        asyncio.run(service.publish(data, version))
        expected[version] = asyncio.run(service.search(QUERIES))
    asyncio.run(service.publish(initial, 0))  # a roll-back

    async def run():
        loop, over, answers = asyncio.get_running_loop(), asyncio.Event(), []

        async def caller(first):
            while not over.is_set():
                answers.append((first, await service.search(QUERIES[first : first + 3])))

        callers = [asyncio.create_task(caller(i % 10)) for i in range(16)]
        for version, data in adapters.items():
            seen = len(answers)
            while len(answers) < seen + 32:
                await asyncio.sleep(0)
            started = loop.time()
            await service.publish(data, version)
            # whoever asks after the answer gets the new version
            assert (await service.search(QUERIES[:1]))[0]["adapter_version"] == version
            waits.append(loop.time() - started)
        over.set()
        await asyncio.gather(*callers)
        return answers

    answers = asyncio.run(run())
    assert max(waits) < 1
    assert {found[0]["adapter_version"] for _, found in answers} == {0, 1, 2, 3}
    for first, found in answers:
        (version,) = {answer["adapter_version"] for answer in found}
        for answer, right in zip(found, expected[version][first : first + 3], strict=True):
            assert answer["ids"] == right["ids"] and answer["scores"] == pytest.approx(right["scores"], abs=1e-5)


def test_the_service_refuses_a_version_that_is_no_number(service, made):
    data = made(1)
    for version in (-1, True, 1.0, "1", None):
        with pytest.raises(ValueError, match="not a whole number"):
            asyncio.run(service.publish(data, version))
    asyncio.run(service.publish(data, 1))
    with pytest.raises(VersionConflict):
        asyncio.run(service.publish(made(2), 1))
