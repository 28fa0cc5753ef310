"""The command line: exit codes, one-line errors, JSON last; the work itself is tested where it is done."""

import json
import sys
import types
from pathlib import Path

import pytest

from verl_bridge import __version__, cli
from verl_bridge.commands import train

COMMANDS = [
    "doctor",
    "demo",
    "train",
    "index build",
    "index check",
    "query",
    "serve",
    "publish",
    "eval",
    "bench bridge",
    "bench estimators",
    "bench gca",
    "bench salience",
    "bench retrieval",
    "data check",
    "export",
]


def failing(capsys, *arguments) -> str:
    """The one line a bad input leaves on stderr."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("verl-bridge: ") and err.count("\n") == 1, err
    return err


def usage_error(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "train"])
def test_help_of_every_command(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split(), "--help"])
    assert stop.value.code == 0 and command in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"verl-bridge {__version__}\n"


def test_unknown_command_and_argument_are_usage_errors(capsys):
    assert "invalid choice" in usage_error(capsys, "served")
    assert "unrecognized arguments: --stepz" in usage_error(capsys, "demo", "--stepz", "2")
    assert "--steps: '0' is not a whole number" in usage_error(capsys, "demo", "--steps", "0")
    assert "bridge_gca" in usage_error(capsys, "demo", "--arm", "off")


@pytest.fixture
def demo(monkeypatch):
    """In place of training: what the command asks of it."""
    calls = []
    fake = types.ModuleType("verl_bridge.embedded.demo")
    fake.run = lambda **arguments: calls.append(arguments) or {"em_end": 0.5}
    import verl_bridge.embedded

    monkeypatch.setitem(sys.modules, "verl_bridge.embedded.demo", fake)
    monkeypatch.setattr(verl_bridge.embedded, "demo", fake, raising=False)
    return calls


def test_demo_hands_its_arguments_on(demo, capsys):
    assert cli.main(["demo", "--arm", "gca", "--steps", "2", "--seed", "7", "--out", "x", "--json"]) == 0
    assert demo == [{"arm": "gca", "steps": 2, "seed": 7, "out": Path("x"), "corpus": None, "questions": None}]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"em_end": 0.5}


def test_demo_on_your_own_files(demo):
    cli.main(["demo", "--corpus", "c.jsonl", "--questions", "q.jsonl.gz"])
    assert (demo[0]["corpus"], demo[0]["questions"]) == (Path("c.jsonl"), Path("q.jsonl.gz"))
    assert (demo[0]["arm"], demo[0]["seed"], demo[0]["steps"]) == ("bridge_gca", 0, None)


def test_demo_arguments_fit_its_signature():
    import inspect

    from verl_bridge.embedded import demo as real

    inspect.signature(real.run).bind(arm="gca", steps=2, seed=7, out=None, corpus=None, questions=None)


def test_demo_refuses_half_of_your_own_files(capsys):
    assert "--questions" in failing(capsys, "demo", "--corpus", "c.jsonl")


def test_train_hands_hydra_its_arguments_and_verl_our_plugin(monkeypatch):
    calls = []
    monkeypatch.setattr(train.subprocess, "call", lambda command, env: calls.append((command, env)) or 3)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    overrides = ["+verl_bridge=gca", "--cfg", "job", "~trainer.logger", "--config-name", "x", "--help"]
    assert cli.main(["train", *overrides]) == 3
    command, env = calls[0]
    assert command == [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    assert env["VERL_USE_EXTERNAL_MODULES"] == "mine,verl_bridge.plugin"


def test_a_dry_run_is_a_program_of_ours_and_verl_never_sees_the_option(monkeypatch):
    calls = []
    monkeypatch.setattr(train.subprocess, "call", lambda command, env: calls.append(command) or 1)
    assert cli.main(["train", "+verl_bridge=gca", "--dry-run", "data.seed=1"]) == 1
    assert calls[0][1:] == ["-m", "verl_bridge.integrations.verl.dry_run", "+verl_bridge=gca", "data.seed=1"]


@pytest.mark.parametrize(
    ("override", "platform"),
    [("+verl_bridge_host=cpu", "cpu"), ("+verl_bridge_host=cpu_separate_async", "cpu"), ("data.seed=1", None)],
)
def test_train_sets_the_cpu_platform_when_the_host_is_asked_for(monkeypatch, override, platform):
    seen = []
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(train.subprocess, "call", lambda command, env: seen.append(env) or 0)
    assert cli.main(["train", "+verl_bridge=gca", override]) == 0
    assert seen[0].get("VERL_PLATFORM") == platform


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("VERL_BRIDGE_DEBUG", "1")
    with pytest.raises(ValueError, match="does not exist"):
        cli.main(["data", "check", "nowhere.jsonl"])


def test_missing_files_are_named(capsys, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    assert nowhere in failing(capsys, "data", "check", nowhere)
    assert nowhere in failing(capsys, "index", "check", "--corpus", nowhere, "--index", nowhere)
    assert nowhere in failing(capsys, "index", "build", "--corpus", nowhere, "--encoder", nowhere, "--out", nowhere)
    assert not Path(nowhere).exists()


def test_an_unforeseen_error_is_one_line_with_its_type_and_exit_code_2(demo, capsys, monkeypatch):
    def fail(**arguments):
        raise AttributeError("no\nsuch thing")

    monkeypatch.setattr(sys.modules["verl_bridge.embedded.demo"], "run", fail)
    assert failing(capsys, "demo") == (
        "verl-bridge: AttributeError: no such thing; VERL_BRIDGE_DEBUG=1 shows the traceback\n"
    )
    monkeypatch.setenv("VERL_BRIDGE_DEBUG", "1")
    with pytest.raises(AttributeError):
        cli.main(["demo"])
