"""Who answers the searches, and that everybody who does has the learner's adapter before anything is searched again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_bridge.config.schema import ConfigError, VerlBridgeConfig
from verl_bridge.integrations.verl import retrieval
from verl_bridge.retrieval import deployment
from verl_bridge.retrieval.client import RetrievalClient

FILES = {"corpus": "c", "index": "i", "encoder": "e"}


def settings(**retriever):
    return VerlBridgeConfig.from_mapping({"retriever": {**FILES, "deadline": 2.0, **retriever}}).retriever


def answer(query, version, shift=0.0, ids=("a", "b"), golds="Lima"):
    documents = [{"id": i, "title": f"title {i}", "text": f"{golds if i == 'b' else ''} {query}"} for i in ids]
    found = {"status": "ok", "error": None, "ids": list(ids), "documents": documents, "adapter_version": version}
    return {**found, "scores": [0.5 + shift - n / 10 for n in range(len(ids))]}


class Actor:
    """The learner's actor: every method answers at once, as ray.get is made to give back what it is given."""

    def __init__(self):
        self.version, self.searched = 0, []
        self.adapter_bytes = SimpleNamespace(remote=lambda: (self.version, b"adapter %d" % self.version))
        self.search = SimpleNamespace(remote=self._search)
        self.scores = SimpleNamespace(remote=lambda queries, ids: [[{"a": 0.5, "b": 0.4}[i] for i in r] for r in ids])

    def _search(self, queries, top_k):
        self.searched.append((list(queries), top_k))
        return [answer(query, self.version) for query in queries]


class AwaitableActor(Actor):
    async def _search(self, queries, top_k):
        return super()._search(queries, top_k)


class Serving:
    """Ray Serve's side."""

    def __init__(self, refuses=None):
        self.published, self.stopped, self.refuses = [], 0, refuses

    async def search(self, queries, top_k):
        return [answer(query, 0) for query in queries]

    def publish(self, adapter, version):
        if self.refuses:
            raise self.refuses
        self.published.append((adapter, version))

    def stop(self):
        self.stopped += 1


class Server:
    """A retrieval server: remembers what was published and serves it, unless it was told otherwise."""

    def __init__(self, **found):
        self.version, self.published, self.found, self.refuses = 9, [], found, None

    async def publish(self, request):
        if self.refuses:
            return web.json_response({"detail": self.refuses}, status=409)
        self.published.append((await request.read(), dict(request.query)))
        self.version = int(request.query["version"])
        return web.json_response({"adapter_version": self.version})

    async def search(self, request):
        asked = await request.json()
        results = [answer(query, self.version, **self.found) for query in asked["queries"]]
        return web.json_response({"adapter_version": self.version, "results": results})


def with_servers(servers, work):
    """Runs ``work(url)`` in a thread, as verl's trainer has no event loop, while the servers run."""

    async def run():
        started = []
        for server in servers:
            app = web.Application()
            app.router.add_post("/adapter", server.publish)
            app.router.add_post("/search", server.search)
            started.append(TestServer(app))
            await started[-1].start_server()
        try:
            return await asyncio.to_thread(work, ",".join(str(one.make_url("")) for one in started))
        finally:
            for one in started:
                await one.close()

    return asyncio.run(run())


@pytest.fixture
def started(monkeypatch):
    """What was started, with which settings; nothing real is."""
    calls = SimpleNamespace(actor=None, actors=[], served=[], serving=Serving())

    def start_retriever(name, **given):
        calls.actors.append((name, given))
        calls.actor = Actor()
        return calls.actor

    def start_serving(name, **given):
        calls.served.append((name, given))
        return calls.serving

    monkeypatch.setattr(retrieval, "start_retriever", start_retriever)
    monkeypatch.setattr(deployment, "start_serving", start_serving)
    monkeypatch.setattr(retrieval.ray, "get", lambda value: value)
    return calls


def test_the_loop_searches_where_the_settings_say(monkeypatch):
    retrieval.search_source.cache_clear()
    monkeypatch.setattr(retrieval, "get_retriever", lambda name: f"actor {name}")
    monkeypatch.setattr(deployment, "get_serving", lambda name: f"application {name}")
    monkeypatch.setenv("T", "secret")
    actor = retrieval.search_source(settings(actor_name="r"))
    assert isinstance(actor, retrieval.ActorSource) and actor._actor == "actor r"
    assert retrieval.search_source(settings(actor_name="r")) is actor  # looked up once a process
    for spread in ({"replicas": 2}, {"shards": 2}):
        assert retrieval.search_source(settings(actor_name="s", **spread)) == "application s"
    client = retrieval.search_source(settings(url="http://a:1,http://b:2/", token_env="T"))
    assert isinstance(client, RetrievalClient) and client.urls == ["http://a:1", "http://b:2"]
    assert client.deadline == 2.0 and client._headers["Authorization"] == "Bearer secret"
    retrieval.search_source.cache_clear()


def test_bad_addresses_and_tokens_name_the_key(monkeypatch):
    with pytest.raises(ConfigError, match=r"verl_bridge\.retriever\.url='a:1'.*give http://HOST:PORT"):
        retrieval.make_client(settings(url="a:1"))
    monkeypatch.setenv("T", "two\nlines")
    with pytest.raises(ConfigError, match=r"token in T: the bearer token .* printable ASCII"):
        retrieval.make_client(settings(url="http://a:1", token_env="T"))


def test_an_actor_alone_serves_what_it_learns(started):
    made = retrieval.TrainerRetrieval(settings(family="e5", query_prefix="q: "), seed=7, updater="updater")
    ((name, given),) = started.actors
    assert (name, given["updater"], given["timeout"], given["threads"]) == ("verl_bridge_retriever", "updater", 300, 1)
    opened = {key: given[key] for key in (*FILES, "family", "query_prefix", "passage_prefix", "lora_rank", "seed")}
    assert opened == {**FILES, "family": "e5", "query_prefix": "q: ", "passage_prefix": None, "lora_rank": 16} | {
        "seed": 7
    }
    assert made.actor is started.actor and not made.publishes and not started.served
    made.publish()  # nobody else serves
    made.check_served([3])  # the updater itself compares versions
    made.stop()


def test_the_settings_are_those_that_a_retriever_opens_with():
    import inspect

    from verl_bridge.retrieval.retriever import open_retriever

    keywords = inspect.signature(open_retriever).parameters
    assert set(retrieval.retriever_files(settings())) <= set(keywords)


def test_servers_have_every_version_before_anything_is_searched_again(started):
    servers = [Server(), Server(shift=0.004)]  # bfloat16 on the other side

    def work(url):
        made = retrieval.TrainerRetrieval(settings(url=url), seed=0, updater="updater")
        assert made.publishes and [server.version for server in servers] == [0, 0]
        made.check_served([0, 0])
        for version in (1, 2):
            started.actor.version = version
            made.publish()
            assert [server.version for server in servers] == [version, version]
        started.actor.version = 1
        made.publish(begin=True)  # resumed
        made.check_served([])
        return made

    with_servers(servers, work)
    for server in servers:
        assert [body for body, _ in server.published] == [b"adapter 0", b"adapter 1", b"adapter 2", b"adapter 1"]
        assert [query.get("replace") for _, query in server.published] == ["true", None, None, "true"]
    assert not started.served


def test_a_server_that_answers_from_another_version_is_noticed(started):
    def work(url):
        made = retrieval.TrainerRetrieval(settings(url=url), seed=0, updater="updater")
        started.actor.version = 3
        made.publish()
        made.check_served([3, 3])
        with pytest.raises(
            RuntimeError, match=r"by adapter version 0, 1, but 3 was published to .*url='http.*restarted"
        ):
            made.check_served([3, 1, 0])

    with_servers([Server()], work)


def test_a_publication_that_fails_stops_the_run(started):
    good, bad = Server(), Server()

    def work(url):
        made = retrieval.TrainerRetrieval(settings(url=url), seed=0, updater="updater")
        bad.refuses = "other bytes"
        started.actor.version = 1
        with pytest.raises(
            RuntimeError, match=r"adapter version 1 is not served by all of .*HTTP 409: other bytes.*stop"
        ):
            made.publish()

    with_servers([good, bad], work)
    assert (good.version, bad.version) == (1, 0)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"shift": 0.05}, r"it scores \[0\.55"),
        ({"ids": ("x", "y")}, r"it finds \['x', 'y'\], not all of which are in the learner's corpus"),
        ({"ids": ()}, r"it finds nothing"),
    ],
)
def test_a_server_over_something_else_is_refused(started, found, says):
    def work(url):
        with pytest.raises(RuntimeError, match=rf"disagree on 'capital of a country': {says}.*query prefix"):
            retrieval.TrainerRetrieval(settings(url=url), seed=0, updater="updater")

    with_servers([Server(), Server(**found)], work)


def test_without_a_learner_servers_keep_what_they_serve(started):
    server = Server()

    def work(url):
        made = retrieval.TrainerRetrieval(settings(url=url), seed=0, updater=None)
        made.publish(begin=True)
        return made.actor, made.recall([("capital of Peru", ["Lima"])], shown=1)

    actor, recall = with_servers([server], work)
    assert actor is None and not started.actors and not server.published
    assert recall == {"recall_shown": 0.0, "recall_top_k": 1.0, "failed": 0.0, "n": 1.0, "adapter_version": 9.0}


def test_ray_serve_starts_from_the_same_seed_and_takes_every_later_version(started):
    made = retrieval.TrainerRetrieval(settings(replicas=2, shards=3), seed=5, updater="updater")
    ((name, given),) = started.served
    assert (name, given["replicas"], given["shards"], given["seed"]) == ("verl_bridge_retriever", 2, 3, 5)
    alike = {key: value for key, value in given.items() if key not in ("replicas", "shards")}
    assert alike == {key: value for key, value in started.actors[0][1].items() if key not in ("updater", "searchable")}
    assert not started.actors[0][1]["searchable"]  # the learner looks vectors up, the replicas search
    assert started.serving.published == []  # version 0 is theirs already
    started.actor.version = 4
    made.publish()
    assert started.serving.published == [(b"adapter 4", 4)]
    made.check_served([4])
    made.stop()
    made.stop()
    assert started.serving.stopped == 1


def test_ray_serve_that_does_not_follow_stops_the_run(started):
    made = retrieval.TrainerRetrieval(settings(replicas=2), seed=0, updater="updater")
    started.actor.version, started.serving.refuses = 1, RuntimeError("replica 2 is dead")
    with pytest.raises(RuntimeError, match=r"not served by all of the 2 replicas of .*replica 2 is dead"):
        made.publish()


def test_ray_serve_without_a_learner_needs_no_actor(started):
    made = retrieval.TrainerRetrieval(settings(replicas=2), seed=0, updater=None)
    assert made.actor is None and not started.actors and len(started.served) == 1
    assert made.recall([("x", ["Lima"])], shown=2)["recall_shown"] == 1.0


def test_a_start_that_fails_leaves_no_application(started, monkeypatch):
    def broken(self, *, begin=False):
        raise RuntimeError("no")

    monkeypatch.setattr(retrieval.TrainerRetrieval, "publish", broken)
    with pytest.raises(RuntimeError, match="no"):
        retrieval.TrainerRetrieval(settings(replicas=2), seed=0, updater="updater")
    assert started.serving.stopped == 1


def test_a_taken_name_is_named_by_its_key(started, monkeypatch):
    def taken(name, **given):
        raise ValueError("it runs already; choose another name")

    monkeypatch.setattr(deployment, "start_serving", taken)
    with pytest.raises(ValueError, match=r"verl_bridge\.retriever\.actor_name='r': it runs already"):
        retrieval.TrainerRetrieval(settings(replicas=2, actor_name="r"), seed=0, updater=None)


def test_recall_counts_aliases_in_shown_and_in_all_and_says_what_failed(started, monkeypatch):
    actor = AwaitableActor()
    monkeypatch.setattr(retrieval, "get_retriever", lambda name: actor)
    made = retrieval.TrainerRetrieval(settings(top_k=10), seed=0, updater=None)
    # the second document holds "Lima"; a query is part of every document's text
    probe = [("river", ["Lima"]), ("Quito", ["quito"]), ("river", ["Rome"]), *[("x", ["x"])] * 97]
    assert made.recall(probe, shown=1) == {
        "recall_shown": 98 / 100,
        "recall_top_k": 99 / 100,
        "failed": 0.0,
        "n": 100.0,
        "adapter_version": 0.0,
    }
    assert [(len(queries), top_k) for queries, top_k in actor.searched] == [(64, 10), (36, 10)]

    failed = {"status": "error", "error": "full", "ids": [], "scores": [], "documents": [], "adapter_version": None}
    monkeypatch.setattr(Actor, "_search", lambda self, q, k: [failed, *[answer(x, 2) for x in q[1:]]])
    found = made.recall([("Lima", ["Lima"])] * 4, shown=1)
    assert (found["recall_shown"], found["failed"], found["adapter_version"]) == (0.75, 0.25, 2.0)
    with pytest.raises(RuntimeError, match=r"every search of the recall probe failed at the actor .*: full"):
        made.recall([("Lima", ["Lima"])], shown=1)
