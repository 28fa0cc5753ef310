"""The search tool on verl-tool's wire: one batched search, failures that look like none of the evidence."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys

import pytest

from verl_bridge.integrations.verl_tool import TOOL, serve, tool_server
from verl_bridge.qa.actions import CORRECTION, RETRIEVAL_FAILED
from verl_bridge.retrieval.protocol import observe, read_actions, request_models
from verl_bridge.retrieval.wire import failed_answer

PARIS = {"id": "d0", "title": "Paris", "text": "Paris is the capital of France."}
ROME = {"id": "d1", "title": "Rome", "text": "Rome is the capital of Italy."}
FOUND = {
    "status": "ok",
    "error": None,
    "ids": ["d0", "d1"],
    "scores": [0.9, 0.25],
    "documents": [PARIS, ROME],
    "adapter_version": 4,
}


class Source:
    """Answers ``FOUND`` to everything but "down" and "broken"; counts its calls."""

    def __init__(self):
        self.calls = []

    async def search(self, queries, top_k):
        self.calls.append((list(queries), top_k))
        if "broken" in queries:
            raise MemoryError("no room")
        return [failed_answer("nobody listens") if query == "down" else FOUND for query in queries]


@pytest.fixture
def tool(tool_class, monkeypatch):
    monkeypatch.setenv("VERL_BRIDGE_RETRIEVER_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("VERL_BRIDGE_SHOWN", "1")
    monkeypatch.setenv("VERL_BRIDGE_TOP_K", "2")
    tool = tool_class(num_workers=4)
    tool.source = Source()
    return tool


def ask(tool, *actions, finish=()):
    extra = [{"finish": i in finish, "is_last_step": False} for i in range(len(actions))]
    return asyncio.run(tool.aget_observations([f"t{i}" for i in range(len(actions))], list(actions), extra))


def test_a_search_shows_the_first_and_records_all(tool):
    ((told,), done, valid) = ask(tool, "<think>hm</think><search> capital of France </search>")
    assert told["obs"] == "\n\n<information>Doc 1(Title: Paris) Paris is the capital of France.</information>\n\n"
    assert (told["status"], told["query"], told["shown"]) == ("ok", "capital of France", 1)
    assert (told["ids"], told["scores"], told["adapter_version"]) == (["d0", "d1"], [0.9, 0.25], 4)
    assert (done, valid) == ([False], [True])


def test_a_batch_is_one_search_with_every_answer_in_its_place(tool):
    actions = ["<search>a</search>", "<answer>x</answer>", "<search>down</search>", "<search></search>", ""]
    told, dones, valids = ask(tool, *actions, finish={4})
    assert tool.source.calls == [(["a", "down"], 2)]
    assert [t["status"] for t in told] == ["ok", "none", "error", "none", "none"]
    assert [t["obs"] for t in told[1:]] == ["", RETRIEVAL_FAILED, CORRECTION, ""]
    assert dones == [False, True, False, False, True]
    assert valids == [True, False, False, False, True]


@pytest.mark.parametrize("query", ["down", "broken"])
def test_a_failed_search_is_no_empty_information_and_is_not_valid(tool, query):
    ((told,), (done,), (valid,)) = ask(tool, f"<search>{query}</search>")
    assert told["obs"] == RETRIEVAL_FAILED and "<information>" not in told["obs"]
    assert told["status"] == "error" and told["ids"] == [] and told["adapter_version"] is None
    assert told["error"] in ("nobody listens", "no room") and told["invalid_reason"] == told["error"]
    assert (done, valid) == (False, False)


def test_a_query_that_is_too_long_is_not_searched_for(tool):
    ((told,), _, (valid,)) = ask(tool, f"<search>{'x' * 20_000}</search>")
    assert tool.source.calls == [] and told["status"] == "error" and not valid


def test_without_a_search_nobody_is_asked(tool):
    ask(tool, "<answer>x</answer>", "no action at all")
    assert tool.source.calls == []


def test_the_close_call_is_done_and_valid(tool):
    ((told,), done, valid) = ask(tool, "", finish={0})
    assert (told["obs"], told["status"], done, valid) == ("", "none", [True], [True])


def test_the_server_and_the_tool_answer_a_request_alike(tool):
    """`verl-bridge serve` answers the same wire: the two may not tell a trainer different things."""
    actions = ["<search>a</search>", "<answer>x</answer>", "<search>down</search>", "thinking", ""]
    finish = [False, False, False, False, True]
    request = request_models().observation(trajectory_ids=list("abcde"), actions=actions, finish=finish)
    answers = {0: FOUND, 2: failed_answer("nobody listens")}
    served = [observe(action, answers.get(i), 1) for i, action in enumerate(read_actions(request))]
    told, dones, valids = ask(tool, *actions, finish={4})
    assert [list(column) for column in zip(*served, strict=True)] == [told, dones, valids]


def test_it_takes_what_bears_its_tags_and_nothing_else(tool):
    """The server gives an action to the first tool that takes it; one it refuses gets an empty observation."""
    assert tool.parse_action("<search>q</search>") == ("q", True)
    assert tool.parse_action("<answer>a</answer>") == ("a", True)
    assert tool.parse_action("<search> </search>") == ("", True)
    assert tool.parse_action("```python\nprint(1)\n```")[1] is False


def test_the_sync_door_is_the_same(tool):
    direct = tool.get_observations(["t"], ["<search>a</search>"], [{}])
    assert direct == ask(tool, "<search>a</search>")
    assert tool.conduct_action("t", "<search>a</search>", {}) == (direct[0][0], False, True)


def test_the_server_takes_the_door_that_waits_for_nobody(tool):
    assert inspect.iscoroutinefunction(tool.aget_observations)


def test_a_tool_without_a_retriever_ends_the_server(tool_class, monkeypatch):
    """verl-tool logs any Exception of a tool and serves without it; SystemExit gets through."""
    monkeypatch.delenv("VERL_BRIDGE_RETRIEVER_URL", raising=False)
    with pytest.raises(SystemExit, match="verl_bridge: the search tool has nothing to search"):
        tool_class(num_workers=1)


def test_the_tool_becomes_one_of_theirs(base):
    tool_server.register()
    tool_server.register()
    assert base.ALL_TOOLS.count(TOOL) == 1 and base.registered_tools[TOOL].tool_type == TOOL
    assert sys.modules[f"verl_tool.servers.tools.{TOOL}"].BridgeSearchTool is base.registered_tools[TOOL]


@pytest.mark.parametrize(
    ("tools", "options", "words"),
    [
        (
            "verl_bridge_serach",
            {},
            "--tool_type 'verl_bridge_serach' is not a tool of verl-tool's or ours: choose one of base",
        ),
        ("search_retrieval", {}, "without verl_bridge_search: add it"),
        (TOOL, {"use_ray": True}, "leave the flag out"),
    ],
)
def test_a_tool_server_that_would_start_without_the_tool_is_refused(base, tools, options, words):
    tool_server.register()
    with pytest.raises(ValueError) as refusal:
        tool_server.check(tools, **options)
    assert words in str(refusal.value)


def test_tools_may_be_joined(base):
    tool_server.register()
    assert tool_server.check(f"{TOOL}, finish") == f"{TOOL},finish" == tool_server.check((TOOL, "finish"))


def test_spawned_servers_are_ours(monkeypatch):
    started = []
    monkeypatch.setattr(serve.subprocess, "Popen", lambda command, **options: started.append((command, options)))
    serve.OurServers.Popen(["python", "-m", "verl_tool.servers.tool_server", "--port", "1"], stdout=None)
    assert started == [
        (["python", "-m", "verl_bridge.integrations.verl_tool.tool_server", "--port", "1"], {"stdout": None})
    ]
    assert serve.OurServers.TimeoutExpired is subprocess.TimeoutExpired
    with pytest.raises(RuntimeError, match="use the commit that is supported"):
        serve.OurServers.Popen(["python", "-m", "verl_tool.servers.another"])
