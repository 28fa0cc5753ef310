from types import SimpleNamespace

import pytest
from standins import Actor, Serving

from verl_bridge.integrations import retrieval
from verl_bridge.retrieval import deployment


@pytest.fixture
def started(monkeypatch):
    """What was started, with which settings; nothing real is."""
    calls = SimpleNamespace(actor=None, actors={}, handles={}, served=[], serving=Serving())

    def start_retriever(name, **given):
        calls.actors[name], calls.handles[name] = given, Actor()
        calls.actor = calls.handles[name]
        return calls.actor

    def start_serving(name, **given):
        calls.served.append((name, given))
        return calls.serving

    monkeypatch.setattr(retrieval, "start_retriever", start_retriever)
    monkeypatch.setattr(deployment, "start_serving", start_serving)
    return calls
