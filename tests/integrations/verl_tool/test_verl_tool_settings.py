"""The tool's settings from the environment: what is taken, what is refused, and by which words."""

import pytest

from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations.verl_tool.settings import open_source, read_counts
from verl_bridge.retrieval.client import RetrievalClient


def test_a_client_of_the_servers_that_are_named():
    env = {"VERL_BRIDGE_RETRIEVER_URL": "http://127.0.0.1:8000/,http://127.0.0.1:8001", "VERL_BRIDGE_DEADLINE": "7.5"}
    client = open_source(env)
    assert isinstance(client, RetrievalClient)
    assert client.urls == ["http://127.0.0.1:8000", "http://127.0.0.1:8001"] and client.deadline == 7.5


def test_the_search_gives_up_before_verl_tool_does():
    """verl-tool ends a rollout after tool_call_timeout (30 s): the model must have read an error before that."""
    assert open_source({"VERL_BRIDGE_RETRIEVER_URL": "http://127.0.0.1:1"}).deadline < 30


def test_the_token_goes_along():
    client = open_source({"VERL_BRIDGE_RETRIEVER_URL": "http://127.0.0.1:1", "VERL_BRIDGE_TOKEN": "secret"})
    assert client._headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "set VERL_BRIDGE_RETRIEVER_URL to a `verl-bridge serve`, or VERL_BRIDGE_CORPUS and VERL_BRIDGE_INDEX"),
        ({"VERL_BRIDGE_CORPUS": "c.jsonl"}, "set VERL_BRIDGE_RETRIEVER_URL"),
        (
            {"VERL_BRIDGE_RETRIEVER_URL": "http://h:1", "VERL_BRIDGE_INDEX": "i"},
            "VERL_BRIDGE_RETRIEVER_URL='http://h:1' and VERL_BRIDGE_CORPUS or VERL_BRIDGE_INDEX exclude each other",
        ),
        ({"VERL_BRIDGE_RETRIEVER_URL": "localhost:8000"}, "VERL_BRIDGE_RETRIEVER_URL='localhost:8000'"),
        (
            {"VERL_BRIDGE_RETRIEVER_URL": "http://h:1", "VERL_BRIDGE_TOKEN": "a\nb"},
            "with the token in VERL_BRIDGE_TOKEN",
        ),
        ({"VERL_BRIDGE_RETRIEVER_URL": "http://h:1", "VERL_BRIDGE_DEADLINE": "soon"}, "VERL_BRIDGE_DEADLINE='soon'"),
        ({"VERL_BRIDGE_RETRIEVER_URL": "http://h:1", "VERL_BRIDGE_DEADLINE": "nan"}, "VERL_BRIDGE_DEADLINE='nan'"),
        ({"VERL_BRIDGE_RETRIEVER_URL": "http://h:1", "VERL_BRIDGE_SHOWN": "2.5"}, "VERL_BRIDGE_SHOWN='2.5'"),
        (
            {"VERL_BRIDGE_RETRIEVER_URL": "http://h:1", "VERL_BRIDGE_SHOWN": "11"},
            "VERL_BRIDGE_TOP_K=10 is below VERL_BRIDGE_SHOWN=11",
        ),
        ({"VERL_BRIDGE_CORPUS": "/nowhere.jsonl", "VERL_BRIDGE_INDEX": "/no"}, "VERL_BRIDGE_CORPUS='/nowhere.jsonl'"),
    ],
)
def test_a_refusal_names_the_variable(env, words):
    with pytest.raises(ConfigError) as refusal:
        open_source(env)
    assert words in str(refusal.value)


def test_counts_default_to_the_papers():
    assert read_counts({}) == (3, 10)
    assert read_counts({"VERL_BRIDGE_SHOWN": "2", "VERL_BRIDGE_TOP_K": "4"}) == (2, 4)
