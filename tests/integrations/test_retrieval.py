"""Who answers the searches, and that everybody who does has the learner's adapter before anything is searched again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from standins import Found, answer, opened, settings

from verl_bridge.integrations import retrieval, sources
from verl_bridge.retrieval import deployment


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
        made.save("/checkpoints/global_step_3/retriever")
        with pytest.raises(
            RuntimeError,
            match=r"by adapter version 0, 1, but 3 was published to .*url='http.*restarted.*"
            r"from /checkpoints/global_step_3/retriever to publish again",
        ):
            made.check_served([3, 1, 0])

    with_servers([Server()], work)


def test_a_server_that_was_started_again_is_given_the_present_version(started):
    servers = [Server(), Server()]

    def work(url):
        made = retrieval.TrainerRetrieval(settings(url=url), seed=0, updater="updater")
        started.actor.version = 3
        made.publish()
        servers[1].version = 0
        made.publish()
        assert [server.version for server in servers] == [3, 3]
        made.check_served([3, 3])

    with_servers(servers, work)
    shared = retrieval.TrainerRetrieval(settings(), seed=0, updater="updater")
    del started.actor.asked[:]
    shared.publish()
    assert started.actor.asked == [("version",)]  # it learns and serves: nothing is given to anybody


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
        return made.recall([("capital of Peru", ["Lima"])], shown=1)

    recall = with_servers([server], work)
    assert not started.actors and not server.published
    assert recall == {"recall_shown": 0.0, "recall_top_k": 1.0, "failed": 0.0, "n": 1.0, "adapter_version": 9.0}


def test_ray_serve_starts_from_the_same_seed_and_takes_every_later_version(started):
    made = retrieval.TrainerRetrieval(settings(replicas=2, shards=3), seed=5, updater="updater")
    ((name, given),) = started.served
    assert (name, given["replicas"], given["shards"], given["seed"]) == ("verl_bridge_retriever", 2, 3, 5)
    assert (given["timeout"], given["deadline"]) == (300.0, 2.0)
    ((name, learner),) = started.actors.items()
    assert name == "verl_bridge_retriever_learner" and opened(given) == opened(learner)
    assert not learner["searchable"]  # the learner looks vectors up, the replicas search
    assert "ray_actor_options" not in given and given["device"] == "cpu"
    assert started.serving.published == []  # version 0 is theirs already
    started.actor.version = 4
    made.publish()
    assert started.serving.published == [(b"adapter 4", 4, 300.0)]
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
    made = retrieval.TrainerRetrieval(settings(replicas=2, device="cuda", num_gpus=0.5), seed=0, updater=None)
    assert not made.publishes and not started.actors
    ((_, given),) = started.served
    assert (given["ray_actor_options"], given["device"]) == ({"num_gpus": 0.5}, "cuda")
    made.check_served([3])  # nobody learns, so nobody says which version is right
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
    actor = Found()
    monkeypatch.setattr(sources, "get_retriever", lambda name: actor)
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

    async def search(queries, top_k):
        return [failed, *[answer(query, 2) for query in queries[1:]]]

    actor.search = SimpleNamespace(remote=search)
    found = made.recall([("Lima", ["Lima"])] * 4, shown=1)
    assert (found["recall_shown"], found["failed"], found["adapter_version"]) == (0.75, 0.25, 2.0)
    with pytest.raises(RuntimeError, match=r"every search of the recall probe failed at the actor .*: full"):
        made.recall([("Lima", ["Lima"])], shown=1)
