"""The server as a process of its own."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from verl_bridge.retrieval.running import bind


def start(places_file, places_index_folder, minilm, *more, **environment):
    command = [sys.executable, "-m", "verl_bridge.cli", "serve", "--port", "0", "--threads", "1"]
    command += ["--corpus", str(places_file), "--index", str(places_index_folder), "--encoder", minilm, *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def address(process):
    line = process.stdout.readline()
    assert line.startswith("serving on http://127.0.0.1:"), line + process.stderr.read()
    return line.split()[2], line


def test_a_server_answers_what_was_begun_before_sigterm_and_ends_well(places_file, places_index_folder, minilm):
    # a call waits for company long enough to be surely in flight when the signal comes
    process = start(
        places_file,
        places_index_folder,
        minilm,
        *("--max-wait-ms", "3000"),
        VERL_BRIDGE_TOKEN="s3cret",
    )
    try:
        url, line = address(process)
        assert "16 documents × 384, adapter version 0" in line
        right = {"authorization": "Bearer s3cret"}

        async def run():
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                refused = await client.post("/search", json={"queries": ["x"]})
                calls = [
                    asyncio.create_task(client.post("/search", json={"queries": [f"town {i}"]}, headers=right))
                    for i in range(8)
                ]
                while "verl_bridge_queue_queries 8.0" not in (await client.get("/metrics", headers=right)).text:
                    assert not any(call.done() for call in calls)
                process.send_signal(signal.SIGTERM)
                return refused, await asyncio.gather(*calls)

        refused, answers = asyncio.run(run())
        assert refused.status_code == 401
        assert [answer.status_code for answer in answers] == [200] * 8
        assert len({tuple(answer.json()["results"][0]["scores"]) for answer in answers}) == 8
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_served_is_said_in_one_line(places_file, places_index_folder, minilm):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = start(places_file, places_index_folder, minilm, "--port", port)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert f"cannot serve on 127.0.0.1:{port}" in err and "--port" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("token", ["", " ", "two\nlines", "ünicode"])
def test_a_token_that_no_header_can_carry_is_refused(
    places_file, places_index_folder, minilm, token, capsys, monkeypatch
):
    from verl_bridge.cli import main

    arguments = ["serve", "--corpus", str(places_file), "--index", str(places_index_folder), "--encoder", minilm]
    monkeypatch.setenv("MINE", token)
    assert main([*arguments, "--token-env", "MINE"]) == 2
    assert "environment variable MINE holds no usable token" in capsys.readouterr().err
    monkeypatch.delenv("MINE")
    assert main([*arguments, "--token-env", "MINE"]) == 2


def test_bind_takes_a_free_port_and_does_not_listen_yet():
    listener, url = bind("127.0.0.1", 0)
    with listener, socket.socket() as other:
        host, port = listener.getsockname()
        assert url == f"http://127.0.0.1:{port}" and port > 0
        with pytest.raises(ConnectionRefusedError):
            other.connect((host, port))
    with pytest.raises(OSError, match=r"cannot serve on no\.such\.host\.invalid:1 .*choose another --host or --port"):
        bind("no.such.host.invalid", 1)
