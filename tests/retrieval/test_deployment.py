"""One Ray and two applications for all tests; what a test publishes gets the next version, so that order is free."""

import asyncio
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
import torch

from verl_bridge.retrieval import deployment
from verl_bridge.retrieval.deployment import ServedRetriever, get_serving, start_serving
from verl_bridge.retrieval.replica import NAMESPACE, keeper_name
from verl_bridge.retrieval.retriever import open_retriever

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # in Serve itself

QUERIES = [f"what do people in {place} pay with?" for place in ("Avelin", "Borsk", "Caldra", "Dunmoor", "Elsberg")]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    own = not ray.is_initialized()
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    if own:
        ray.shutdown()


@pytest.fixture(scope="module")
def settings(places_file, places_index_folder, minilm):
    return {"corpus": places_file, "index": places_index_folder, "encoder": minilm, "top_k": 4}


@pytest.fixture(scope="module")
def alone(settings):
    """The same retriever in this process."""
    return open_retriever(**settings)


@pytest.fixture(scope="module")
def served(settings):
    served = start_serving("served", replicas=2, timeout=300, **settings)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def sharded(settings):
    placement = {"num_cpus": 0.25, "max_replicas_per_node": 2, "ray_actor_options": {"memory": 2**20}}
    served = start_serving("sharded", shards=3, timeout=300, **placement, **settings)
    yield served
    served.stop()


class Adapters:
    """Adapters by version with the right answers to ``QUERIES``."""

    def __init__(self, retriever):
        self._retriever, self._encoder = retriever, retriever.encoder.queries
        self._start = self._encoder.adapter_state()
        self.right = {0: self._answers()}

    def _answers(self):
        return {query: self._retriever.search([query])[0].to_dict() for query in QUERIES}

    def make(self, version, scale=0.05):
        generator = torch.Generator().manual_seed(version)
        moved = {n: v + scale * torch.randn(v.shape, generator=generator) for n, v in self._start.items()}
        self._encoder.set_adapter_state(moved, version)
        if scale < 1:
            self.right[version] = self._answers()
        return self._encoder.adapter_bytes()

    def check(self, query, answer):
        right = self.right[answer["adapter_version"]][query]
        assert {**answer, "scores": None} == {**right, "scores": None}
        assert answer["scores"] == pytest.approx(right["scores"], abs=1e-5)


@pytest.fixture(scope="module")
def adapters(alone):
    return Adapters(alone)


def current(served):
    return ray.get(ray.get_actor(keeper_name(served.name), namespace=NAMESPACE).current.remote())[0]


class Load:
    """Eight callers that search without pause in an event loop of another thread; knows every answer."""

    def __init__(self, served, adapters):
        self._served, self._adapters = served, adapters
        self._stop, self._news = threading.Event(), threading.Condition()
        self.answers = []  # (moment asked, query, answer)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self):
        await asyncio.gather(*(self._call(i) for i in range(8)))

    async def _call(self, i):
        while not self._stop.is_set():
            queries = [QUERIES[i % 5], QUERIES[(i + 1) % 5]]
            asked = time.monotonic()
            answers = await self._served.search(queries)
            with self._news:
                self.answers += [(asked, *pair) for pair in zip(queries, answers, strict=True)]
                self._news.notify_all()
            i += 1

    def wait(self, more):
        with self._news:
            goal = len(self.answers) + more
            assert self._news.wait_for(lambda: len(self.answers) >= goal, timeout=120)

    def __enter__(self):
        self._thread.start()
        self.wait(20)
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()

    def check(self, old, new, published):
        """No failure, every call and answer of one version, and after ``published`` (moment) of the new one alone."""
        pairs = list(zip(self.answers[::2], self.answers[1::2], strict=True))
        for (asked, query, answer), (_, other, second) in pairs:
            assert answer["status"] == second["status"] == "ok", (answer["error"], second["error"])
            assert answer["adapter_version"] == second["adapter_version"]
            self._adapters.check(query, answer)
            self._adapters.check(other, second)
            if asked > published:
                assert answer["adapter_version"] == new
        assert {answer["adapter_version"] for *_, answer in self.answers} == {old, new}
        assert self.answers[-1][0] > published


def kill(served, part, replica=None):
    """Kills a replica without notice; returns its id."""
    prefix = f"SERVE_REPLICA::{served.name}#{part}#"
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith(prefix)]
    name = next(name for name in names if replica is None or name.endswith(replica))
    ray.kill(ray.get_actor(name, namespace="serve"))
    return name.removeprefix(prefix)


def test_two_replicas_answer_as_one_retriever_and_share_the_load(served, adapters):
    async def caller(i):
        return [(query, (await served.search([query]))[0]) for query in (QUERIES * 2)[i % 5 :]]

    async def run():
        return await asyncio.gather(*(caller(i) for i in range(10)))

    pairs = [pair for answers in asyncio.run(run()) for pair in answers]
    for query, answer in pairs:
        adapters.check(query, answer)
    counts = {replica: answered for replica, _, answered in served._handle.broadcast("describe").results()}
    assert counts.keys() == served.versions().keys() and len(counts) == 2
    assert sum(counts.values()) >= len(pairs) and min(counts.values()) >= len(pairs) / 5


def test_calls_of_any_kind_from_the_event_loop_of_another_process(served, alone):
    @ray.remote(num_cpus=0)
    class Worker:
        async def ask(self):
            served = get_serving("served", deadline=77.0)
            many = [f"town number {i}" for i in range(150)]  # more than a batch
            return await asyncio.gather(
                served.search([" ", "Borsk"], 2), served.search([]), served.search(many, 99), served.search(["x\ud83d"])
            ), served.deadline

    worker = Worker.remote()
    (two, none, many, broken), deadline = ray.get(worker.ask.remote())
    ray.kill(worker)
    assert deadline == 77.0
    assert [(a["status"], a["error"], len(a["ids"])) for a in two] == [
        ("error", "the query is empty", 0),
        ("ok", None, 2),
    ]
    assert two[1]["documents"][0]["title"] == "Borsk" and none == []
    assert len(many) == 150 and {len(answer["ids"]) for answer in many} == {16}
    assert len({answer["adapter_version"] for answer in many}) == 1
    assert len(broken[0]["ids"]) == 4


@pytest.mark.parametrize("call", [("x", None), ([None], None), (["x"], 0), (["x"], True), (["x"], -1), (["x"], "2")])
def test_wrong_arguments_are_refused(served, call):
    with pytest.raises(ValueError, match=r"give a list of strings|ask for at least 1"):
        asyncio.run(served.search(*call))


def test_a_version_published_under_load_is_taken_in_place(served, adapters):
    before, old = served.versions(), current(served)
    adapter = adapters.make(old + 1)
    with Load(served, adapters) as load:
        served.publish(adapter, old + 1, timeout=120)
        published = time.monotonic()
        versions = served.versions()
        load.wait(100)
    load.check(old, old + 1, published)
    assert set(before.values()) == {old} and versions == dict.fromkeys(before, old + 1)  # no replica was restarted


def test_what_cannot_be_published_changes_nothing(served, adapters):
    adapter, version = adapters.make(current(served) + 1), current(served) + 1
    served.publish(adapter, version)
    for wrong, number, reason in (
        (b"no adapter", version + 1, "damaged"),
        (adapter[:-8], version + 1, "damaged"),
        (
            adapters.make(version + 1),
            version,
            rf"version {version} is not newer than {version} \(sha256 [0-9a-f]{{12}}",
        ),
        (adapter, version - 1, f"version {version - 1} is not newer"),
        ("path", version + 1, "give bytes"),
        (adapter, "7", "give bytes and an integer"),
    ):
        with pytest.raises(ValueError, match=reason):
            served.publish(wrong, number)
    assert set(served.versions().values()) == {version} and current(served) == version
    served.publish(adapter, version)  # the same again
    adapters.check(QUERIES[0], asyncio.run(served.search(QUERIES[:1]))[0])


def test_an_adapter_that_would_break_every_search_is_refused_before_it_is_deployed(served, adapters):
    old = current(served)
    with pytest.raises(ValueError, match="not finite; use the one before it"):
        served.publish(adapters.make(old + 1, scale=1e30), old + 1)  # finite, but what it makes of a query is not
    adapters.check(QUERIES[0], asyncio.run(served.search(QUERIES[:1]))[0])
    assert set(served.versions().values()) == {old}
    served.publish(adapters.make(old + 1), old + 1)
    adapters.check(QUERIES[0], asyncio.run(served.search(QUERIES[:1]))[0])


def test_a_replica_killed_while_a_version_is_published(served, adapters):
    before, old = served.versions(), current(served)
    adapter = adapters.make(old + 1)
    with Load(served, adapters) as load, ThreadPoolExecutor(1) as thread:
        publish = thread.submit(served.publish, adapter, old + 1, timeout=240)
        while current(served) == old:
            assert not publish.done()
        dead = kill(served, "retriever", min(before))
        publish.result()  # waits for the one that comes back
        published = time.monotonic()
        versions = served.versions()
        load.wait(100)
    (survivor,) = set(before) - {dead}
    load.check(old, old + 1, published)
    assert len(versions) == 2 and set(versions.values()) == {old + 1}
    assert survivor in versions and dead not in versions


def test_a_search_that_is_not_answered_by_its_deadline_is_an_error(served):
    class Silent:
        def remote(self, queries, top_k):
            return asyncio.get_running_loop().create_future()

    silent = ServedRetriever("served", served._keeper, deadline=0.2)
    silent._handle = SimpleNamespace(search=Silent())
    started = time.monotonic()
    answers = asyncio.run(silent.search(["Borsk", "Avelin"]))
    assert 0.2 <= time.monotonic() - started < 10
    assert [(a["status"], a["error"], a["documents"], a["adapter_version"]) for a in answers] == [
        ("error", "retriever 'served': no answer within 0.2 s", [], None)
    ] * 2


@pytest.mark.parametrize(
    "looks",
    [
        [("UPDATING", {"a": 1, "b": 1}), ("HEALTHY", {"a": 1, "b": 0}), ("HEALTHY", {"a": 1})],
        [("HEALTHY", {}), ("UNHEALTHY", {"a": 1, "b": 1}), ("HEALTHY", {"a": 0, "b": 1})],
    ],
)
def test_published_is_what_every_replica_of_a_healthy_application_serves(monkeypatch, looks):
    served = object.__new__(ServedRetriever)
    served.name, served._try_adapter = "stub", lambda adapter, deadline: None
    served._keeper = SimpleNamespace(publish=SimpleNamespace(remote=lambda adapter, version: ray.put(2)))
    left = []
    served.versions = lambda timeout: left.pop(0)[1] if len(left) > 1 else left[0][1]

    def status(name):
        state = SimpleNamespace(status=SimpleNamespace(value=left[0][0]), message="")
        return SimpleNamespace(deployments={"retriever": state})

    monkeypatch.setattr(deployment, "_status", status)
    left[:] = [*looks, ("HEALTHY", {"a": 1, "b": 1})]
    served.publish(b"", 1)
    assert len(left) == 1  # it looked until the last
    for look in looks:
        left[:] = [look]
        with pytest.raises(
            RuntimeError,
            match=re.escape(f"not served by all 2 replicas of retriever 'stub' within 0 s: versions {look[1]}"),
        ):
            served.publish(b"", 1, timeout=0.2)
    left[:] = [("DEPLOY_FAILED", {"a": 1, "b": 0})]
    with pytest.raises(RuntimeError, match="state DEPLOY_FAILED"):  # at once
        served.publish(b"", 1, timeout=600)


def test_replicas_and_shards_take_the_resources_they_were_given(sharded):
    for _ in range(100):  # Ray counts a little later
        used = {key: ray.cluster_resources()[key] - ray.available_resources()[key] for key in ("CPU", "memory")}
        if used == {"CPU": 1.0, "memory": 4 * 2**20}:  # one replica and three shards
            return
        time.sleep(0.1)
    raise AssertionError(used)


def test_shards_answer_as_the_whole_index_and_one_of_them_may_die(sharded, adapters, alone):
    adapter = adapters.make(1)
    with Load(sharded, adapters) as load:
        sharded.publish(adapter, 1, timeout=120)
        published = time.monotonic()
        kill(sharded, "shard_1")
        load.wait(100)
    load.check(0, 1, published)
    alone.load_adapter(adapter, 1)
    for depth in (1, 5, 7, 16, 99):  # a shard holds 5 or 6 documents
        for answer, right in zip(
            asyncio.run(sharded.search(QUERIES, depth)), alone.search(QUERIES, depth), strict=True
        ):
            assert answer["ids"] == list(right.ids) and len(answer["ids"]) == min(depth, 16)
            assert answer["scores"] == pytest.approx(list(right.scores), abs=1e-5)


def test_settings_that_cannot_be_are_refused_before_anything_starts(settings, served):
    for wrong, reason in (
        ({"replicas": 0}, "replicas=0 cannot serve"),
        ({"name": ""}, "names no application"),
        ({"shards": True}, "shards=True cannot serve"),
        ({"max_batch": 1.5}, "max_batch=1.5 cannot serve"),
        ({"max_wait": -1.0}, "max_wait=-1.0 is negative"),
        ({"chunks": 3}, "unexpected keyword argument 'chunks'"),
    ):
        with pytest.raises(ValueError, match=reason):
            start_serving(**{"name": "refused", **settings, **wrong})
    with pytest.raises(ValueError, match="missing a required"):
        start_serving("refused", corpus="x")
    with pytest.raises(
        ValueError, match=r"'served' runs .*choose another name or, .*delete it: .*stop_serving\('served'\)"
    ):
        start_serving("served", **settings)
    with pytest.raises(RuntimeError, match="no retriever 'refused' is served"):
        get_serving("refused")


def test_a_start_that_fails_names_the_cause_and_leaves_nothing(settings, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(
        RuntimeError, match=r"'broken' did not start: ValueError: corpus .*empty.jsonl holds no documents"
    ):
        start_serving("broken", timeout=100, **{**settings, "corpus": tmp_path / "empty.jsonl"})
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True) if "broken" in actor["name"]]


def test_without_its_keeper_an_application_serves_on_but_takes_no_new_version(sharded, adapters):
    version = current(sharded)
    ray.kill(ray.get_actor(keeper_name("sharded"), namespace=NAMESPACE))
    with pytest.raises(RuntimeError, match=r"'sharded': the keeper failed .*; stop and start it"):
        sharded.publish(adapters.make(version + 1), version + 1)
    (answer,) = asyncio.run(sharded.search(QUERIES[:1]))
    assert answer["adapter_version"] == version
    adapters.check(QUERIES[0], answer)


def test_stop_leaves_no_actor_and_no_answers(served, sharded):
    for application in (served, sharded):
        application.stop()
    assert ray.util.list_named_actors(all_namespaces=True) == []
    assert served.versions() == {}
    served.deadline = 10
    (answer,) = asyncio.run(served.search(["Borsk"]))
    assert answer["status"] == "error" and answer["ids"] == [] and answer["adapter_version"] is None
    assert answer["error"].startswith("retriever 'served': ")
    with pytest.raises(RuntimeError, match="no retriever 'served'"):
        get_serving("served")
