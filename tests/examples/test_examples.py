"""The examples do what they say."""

import difflib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import verl  # noqa: F401  its import loads our plugin, which adds the config group
from hydra import compose, initialize_config_module

from verl_bridge.config import load_settings

EXAMPLES = Path(__file__).parents[2] / "examples"


def composed(script, folder):
    """The config that a launch script trains with: its arguments, composed over the installed verl."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    run = subprocess.run(
        [EXAMPLES / "from_a_verl_script" / script, "data.seed=1"],
        env={**os.environ, "PYTHON": str(python), "INDEX": "/data/index"},
        capture_output=True,
        text=True,
        check=True,
    )
    module, *overrides = run.stdout.removesuffix("\0").split("\0")[1:]
    assert module == "verl.trainer.main_ppo" and overrides[-1] == "data.seed=1"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides)


def test_after_is_before_plus_lines():
    before, after = (
        (EXAMPLES / "from_a_verl_script" / name).read_text().splitlines()[2:] for name in ("before.sh", "after.sh")
    )
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert len(changes) == 4 and all(line.startswith("+ ") for line in changes)
    assert changes[0] == "+   +verl_bridge=bridge_gca \\"


def test_both_scripts_compose(tmp_path):
    before, after = composed("before.sh", tmp_path), composed("after.sh", tmp_path)
    assert "verl_bridge" not in before and before.trainer.v1.trainer_mode == "sync"
    assert after.trainer.v1.trainer_mode == "bridge_sync"
    settings = load_settings(after)
    assert settings.gca.enable and settings.bridge.enable
    assert settings.retriever.index == "/data/index"
    assert (settings.retriever.encoder, settings.retriever.query_prefix) == (None, None)  # the index knows them
    for key in ("algorithm", "data", "critic"):
        assert after[key] == before[key]


def test_without_the_plugin_after_does_not_train_silently():
    """Hydra refuses our settings then, because there is no group to hold them."""
    environment = {**os.environ, "PYTHON": sys.executable, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    environment.pop("VERL_PLATFORM")  # the CPU platform is ours too: verl would stop at that first
    run = subprocess.run(
        [EXAMPLES / "from_a_verl_script/after.sh", "--cfg", "job"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0 and "verl_bridge" in run.stderr


def test_credit_and_retriever_by_hand():
    example = runpy.run_path(str(EXAMPLES / "without_verl/credit_and_retriever.py"))
    advantages = example["grounded"]()
    a = 0.5 / (1 / 3) ** 0.5  # rewards 1, 0, 1, 0: (R − ½)/σ with the n−1 σ
    # δ = ρ·λ·c_max/2 = 0.2·λ·0.25 = λ/20
    rows = [
        (a * (1 + 0.5 / 20), a * (1 + 0.5 / 20)),  # A: both strengthened
        (-a * (1 - 0.5 / 20), -a * (1 + 1.0 / 20)),  # B1: the search is spared, the answer blamed
        (a * (1 - 0.25 / 20), a * (1 - 0.5 / 20)),  # D: right without evidence that others found
        (-a, -a),  # C: untouched
    ]
    for row, (search, answer) in zip(advantages.tolist(), rows, strict=True):
        assert row[:4] == pytest.approx([search] * 4, rel=1e-5)
        assert row[4:9] == [0] * 5
        assert row[9:] == pytest.approx([answer] * 3, rel=1e-5)
    before, after = example["retriever_step"]()
    assert before < 0.5 < 0.85 < after


def test_it_runs_as_a_script(capsys):
    runpy.run_path(str(EXAMPLES / "without_verl/credit_and_retriever.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1].startswith("probability of the gold document: 0.438 -> 0.9")
