"""``bench bridge``: which of its measurements is run, and with what."""

import json

import pytest

from verl_bridge import cli
from verl_bridge.embedded import assets
from verl_bridge.embedded.policy import POLICY_DIR
from verl_bridge.embedded.world import encoder_dir
from verl_bridge.evaluation import bench_bridge, bench_passages, bench_retrieval, bench_tokens


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What is measured, by name, in place of measuring; the demo's files are not made."""
    found = []
    for module, name in (
        (bench_bridge, "measure_bridge"),
        (bench_passages, "measure_passages"),
        (bench_tokens, "measure_tokens"),
    ):
        monkeypatch.setattr(
            module, name, lambda *args, _name=name, **kwargs: found.append((_name, args, kwargs)) or {"ratio": 0.5}
        )
    made = assets.Assets(*[tmp_path / name for name in ("corpus", "index", "e", "p", "t", "v", "f")], "demo")
    monkeypatch.setattr(assets, "embedded_assets", lambda say: made)
    monkeypatch.setenv("VERL_BRIDGE_CACHE", str(tmp_path / "cache"))
    return found


def test_alone_it_is_the_cost_of_an_update_in_the_demos_world(calls, capsys, tmp_path):
    assert cli.main(["bench", "bridge", "--context", "prefix", "--rollouts", "64", "--threads", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ratio": 0.5}
    ((name, args, kwargs),) = calls
    kwargs.pop("say")
    assert (name, args) == ("measure_bridge", ())
    assert kwargs == {
        "corpus": tmp_path / "corpus",
        "index": tmp_path / "index",
        "policy": str(POLICY_DIR),
        "context": "prefix",
        "rollouts": 64,
        "micro_batch_tokens": 4096,
        "repeats": 5,
        "threads": 2,
    }


def test_with_traces_it_is_their_tokens(calls, capsys, tmp_path):
    assert cli.main(["bench", "bridge", "--traces", "step_1.jsonl", "step_2.jsonl"]) == 0
    assert cli.main(["bench", "bridge", "--traces", "s.jsonl", "--corpus", "c.jsonl", "--policy", "p"]) == 0
    assert capsys.readouterr().out.split() == ["ratio", "0.5"] * 2
    (first, second) = [(name, args) for name, args, _ in calls]
    assert first == ("measure_tokens", (["step_1.jsonl", "step_2.jsonl"], tmp_path / "corpus", str(POLICY_DIR)))
    assert second[1][0] == ["s.jsonl"] and str(second[1][1]) == "c.jsonl" and second[1][2] == "p"


def test_with_questions_it_is_the_retriever_alone(calls, tmp_path):
    command = ["bench", "bridge", "--corpus", "c.jsonl", "--questions", "q.jsonl", "--seeds", "4"]
    assert cli.main(command) == 0
    ((name, _, kwargs),) = calls
    assert name == "measure_passages"
    assert (str(kwargs["corpus"]), str(kwargs["questions"]), kwargs["seeds"]) == ("c.jsonl", "q.jsonl", 4)
    assert kwargs["encoder"] == str(encoder_dir()) and kwargs["index"] is None
    assert kwargs["work"] == tmp_path / "cache" / "bench"


@pytest.mark.parametrize(
    ("command", "module", "measured"),
    [
        (["bridge", "--questions", "q.jsonl"], bench_passages, "measure_passages"),
        (["retrieval"], bench_retrieval, "measure"),
    ],
)
def test_an_index_brings_its_own_encoder(monkeypatch, tmp_path, command, module, measured):
    given = {}
    monkeypatch.setattr(module, measured, lambda **kwargs: given.update(kwargs) or {})

    def encoder(*more):
        assert cli.main(["bench", *command, "--corpus", "c.jsonl", "--work", str(tmp_path), *more]) == 0
        return given["encoder"]

    there = ("--index", str(tmp_path))
    assert encoder() == str(encoder_dir()) == encoder("--index", str(tmp_path / "to be built"))
    assert encoder(*there) is None and str(given["index"]) == str(tmp_path)
    assert encoder(*there, "--encoder", "e5") == encoder("--encoder", "e5") == "e5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--questions", "q.jsonl"], "--questions goes with --corpus"),
        (["--questions", "q.jsonl", "--corpus", "c.jsonl", "--traces", "s.jsonl"], "without --traces"),
        (["--corpus", "c.jsonl"], "--corpus without --questions or --traces"),
    ],
)
def test_options_that_do_not_go_together_are_named(calls, capsys, arguments, message):
    assert cli.main(["bench", "bridge", *arguments]) == 2
    assert message in capsys.readouterr().err and calls == []
