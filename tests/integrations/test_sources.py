"""Whom a rollout asks under which settings, and how long it waits for one that died."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import ray
from standins import settings

from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations import sources
from verl_bridge.retrieval import deployment
from verl_bridge.retrieval.client import RetrievalClient


def test_the_loop_searches_where_the_settings_say(monkeypatch):
    sources.search_source.cache_clear()
    monkeypatch.setattr(sources, "get_retriever", lambda name: f"actor {name}")
    monkeypatch.setattr(deployment, "get_serving", lambda name, deadline: f"application {name} {deadline} s")
    monkeypatch.setenv("T", "secret")
    actor = sources.search_source(settings(actor_name="r"))
    assert isinstance(actor, sources.ActorSource) and (actor._actor, actor.deadline) == ("actor r", 2.0)
    assert sources.search_source(settings(actor_name="r")) is actor  # looked up once a process
    for spread in ({"replicas": 2}, {"shards": 2}):
        assert sources.search_source(settings(actor_name="s", **spread)) == "application s 2.0 s"
    client = sources.search_source(settings(url="http://a:1,http://b:2/", token_env="T"))
    assert isinstance(client, RetrievalClient) and client.urls == ["http://a:1", "http://b:2"]
    assert client.deadline == 2.0 and client._headers["Authorization"] == "Bearer secret"
    sources.search_source.cache_clear()


def test_bad_addresses_and_tokens_name_the_key(monkeypatch):
    with pytest.raises(ConfigError, match=r"verl_bridge\.retriever\.url='a:1'.*use http://HOST:PORT"):
        sources.make_client(settings(url="a:1"))
    monkeypatch.setenv("T", "two\nlines")
    with pytest.raises(ConfigError, match=r"token in T: the bearer token .* printable ASCII"):
        sources.make_client(settings(url="http://a:1", token_env="T"))


@pytest.fixture
def mortal(tmp_path):
    """An actor named ``mortal`` that answers with its process, started again only once the file ``again`` is there."""
    own = not ray.is_initialized()
    if own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)

    class Mortal:
        def __init__(self, folder):
            first, again = Path(folder, "first"), Path(folder, "again")
            while first.exists() and not again.exists():
                time.sleep(0.02)
            first.touch()

        async def search(self, queries, top_k):
            if queries == ["wrong"]:
                raise ValueError("no such query")
            return [{"status": "ok", "process": os.getpid(), "query": query} for query in queries]

    yield ray.remote(Mortal).options(name="mortal", num_cpus=0, max_restarts=1).remote(str(tmp_path))
    if own:
        ray.shutdown()


def test_a_search_outlives_the_actor_until_the_deadline(mortal, tmp_path):
    source = sources.ActorSource("mortal", deadline=1.0)

    def search(*queries):
        return asyncio.run(source.search(list(queries), 4))

    first, second = search("a", "b")
    assert (first["query"], second["query"]) == ("a", "b")
    with pytest.raises(ValueError, match="no such query"):  # it lives and refused: nothing to wait for
        search("wrong")
    os.kill(first["process"], signal.SIGKILL)
    late = search("a", "b")
    assert [(answer["status"], answer["adapter_version"], answer["documents"]) for answer in late] == [
        ("error", None, [])
    ] * 2
    assert late[0]["error"] == "the retriever 'mortal' died and it was not back within 1 s"
    (tmp_path / "again").touch()
    source.deadline = 120.0
    (answer,) = search("a")
    assert answer["status"] == "ok" and answer["process"] != first["process"]
    os.kill(answer["process"], signal.SIGKILL)
    (gone,) = search("a")  # for good
    assert gone["error"] == "the retriever 'mortal' died and it is not started again"
