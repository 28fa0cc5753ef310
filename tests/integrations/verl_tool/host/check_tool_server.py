"""Run by verl-tool's own Python: its real tool servers, started by our launchers, and our trainer's look at them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from verl_bridge.config.schema import ConfigError
from verl_bridge.integrations.verl_tool.checks import check_tool_server

PACKAGE = "verl_bridge.integrations.verl_tool"
HOSTILE = {"id": "h", "title": "<eos>", "text": "x <pad> <eos>"}
DOCUMENTS = [{"id": f"d{i}", "title": f"Title {i}", "text": f"text {i}"} for i in range(4)]


class Retriever(BaseHTTPRequestHandler):
    """`verl-bridge serve`'s ``/search``: four documents for every query; counts its requests.

    "broken" gets HTTP 500; for "hostile" the first document spells out control tokens.
    """

    requests: ClassVar[list[list[str]]] = []

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(asked["queries"])
        failed = "broken" in asked["queries"]
        found = [*([HOSTILE] if "hostile" in asked["queries"] else []), *DOCUMENTS][: asked["top_k"]]
        result = {"status": "ok", "error": None, "ids": [d["id"] for d in found], "documents": found}
        result |= {"scores": [1 - i / 8 for i in range(len(found))], "adapter_version": 5}
        answer = {"detail": "no"} if failed else {"adapter_version": 5, "results": [result] * len(asked["queries"])}
        body = json.dumps(answer).encode()
        self.send_response(500 if failed else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def retriever():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def serving(module, retriever, *arguments, timeout=240):
    """A tool server; its ``/get_observation``."""
    port = free_port()
    env = {**os.environ, "VERL_BRIDGE_RETRIEVER_URL": retriever, "VERL_BRIDGE_SHOWN": "2", "VERL_BRIDGE_TOP_K": "4"}
    command = [sys.executable, "-m", module, "--port", str(port), *arguments]
    process = subprocess.Popen(command, env=env, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + timeout
        while True:
            assert process.poll() is None, f"it ended with {process.returncode}"
            assert time.monotonic() < end, "it did not start"
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                    assert answer.status == 200
                    break
            except OSError:
                time.sleep(0.2)
        yield f"{url}/get_observation"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def ask(url, *actions, finish=None):
    body = {"trajectory_ids": [f"t{i}" for i in range(len(actions))], "actions": list(actions)}
    body |= {"finish": finish or [False] * len(actions), "is_last_step": [False] * len(actions)}
    if finish is None:
        body["extra_fields"] = [{"question": "q?"}] * len(actions)
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def look(url):
    """What every tool server with our tool has to answer."""
    Retriever.requests.clear()
    told = ask(url, "<search>a</search>", "<answer>x</answer>", "<search>b</search>", "<search> </search>")
    assert Retriever.requests == [["a", "b"]]  # one search for the batch
    assert told["dones"] == [False, True, False, False] and told["valids"] == [True, False, True, False]
    first, answered, second, refused = told["observations"]
    assert first["obs"].startswith("\n\n<information>Doc 1(Title: Title 0) text 0\nDoc 2(Title: Title 1) text 1</inf")
    assert (first["ids"], first["shown"], first["adapter_version"]) == (["d0", "d1", "d2", "d3"], 2, 5)
    assert second["query"] == "b" and answered["obs"] == "" and "<search>" in refused["obs"]
    failed = ask(url, "<search>broken</search>")
    assert failed["valids"] == [False] and failed["dones"] == [False]
    assert failed["observations"][0]["status"] == "error" and "<information>" not in failed["observations"][0]["obs"]
    closed = ask(url, "", finish=[True])
    assert (closed["observations"], closed["dones"], closed["valids"]) == ([""], [True], [True])
    check_tool_server(url, shown=2, versions={5})
    with pytest.raises(ConfigError, match="shows 2 passages"):
        check_tool_server(url, shown=3)
    with pytest.raises(ConfigError, match=r"serves adapter version 5, the learner has \[0\]"):
        check_tool_server(url, shown=2, versions={0})


def test_one_process(retriever):
    with serving(f"{PACKAGE}.tool_server", retriever) as url:
        look(url)


def test_several_processes_behind_a_router(retriever, tmp_path):
    arguments = ["--uvi_workers", "2", "--max_concurrent_requests", "8", "--log_directory", str(tmp_path)]
    with serving(f"{PACKAGE}.serve", retriever, *arguments) as url:
        look(url)
        assert len(list(tmp_path.glob("*.log"))) >= 2


def test_theirs_starts_healthy_without_a_tool_it_does_not_know(retriever):
    """The trap itself: HTTP 200 at /health, and everything is done and valid."""
    with serving("verl_tool.servers.tool_server", retriever, "--tool_type", "verl_bridge_search") as url:
        told = ask(url, "<search>a</search>")
        assert (told["observations"], told["dones"], told["valids"]) == ([""], [True], [True])
        with pytest.raises(ConfigError, match="answers without the tool verl_bridge_search"):
            check_tool_server(url, shown=2)


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["--tool_type", "no_such_tool"], {}, "verl_bridge: --tool_type 'no_such_tool' is not a tool"),
        ([], {"VERL_BRIDGE_RETRIEVER_URL": ""}, "verl_bridge: the search tool has nothing to search"),
    ],
)
def test_ours_does_not(retriever, arguments, env, words):
    env = {**os.environ, "VERL_BRIDGE_RETRIEVER_URL": retriever, **env}
    command = [sys.executable, "-m", f"{PACKAGE}.tool_server", "--port", str(free_port()), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0 and words in done.stderr


def test_a_server_that_is_down_is_named():
    with pytest.raises(ConfigError, match=r"tool_server_url='http://127.0.0.1:1/get_observation' gives no observation"):
        check_tool_server("http://127.0.0.1:1/get_observation", shown=3)
