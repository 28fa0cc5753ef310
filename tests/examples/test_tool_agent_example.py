"""examples/tool_agent: what its script starts passes every check of a run, and its README names real settings."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from omegaconf import OmegaConf

from verl_bridge.integrations.verl.dry_run import compose_run
from verl_bridge.integrations.verl.preflight import check_settings

FOLDER = Path(__file__).parents[2] / "examples/tool_agent"


def composed(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    files = {"PYTHON": python, "TRAIN": "t.parquet", "VAL": "v.parquet", "CORPUS": "c.jsonl", "INDEX": "i"}
    run = subprocess.run(
        [FOLDER / "run.sh", "data.seed=1"],
        env={**os.environ, **{name: str(value) for name, value in files.items()}},
        capture_output=True,
        text=True,
        check=True,
    )
    module, *found = run.stdout.removesuffix("\0").split("\0")[1:]
    assert module == "verl.trainer.main_ppo" and found[-1] == "data.seed=1"
    return compose_run(found)


def test_the_script_chooses_both_methods_and_the_loop_for_function_calls(tmp_path):
    settings, prepared = check_settings(composed(tmp_path))
    assert settings.gca.enable and settings.bridge.enable
    rollout = prepared.actor_rollout_ref.rollout
    assert rollout.agent.default_agent_loop == "verl_bridge_tool_agent"
    assert (rollout.multi_turn.format, rollout.multi_turn.max_parallel_calls) == ("hermes", 4)


def test_the_table_names_settings_that_there_are(tmp_path):
    keys = re.findall(r"^\| `([\w.]+)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    config = composed(tmp_path)
    assert len(keys) == 5
    for key in keys:
        parent, _, name = key.rpartition(".")
        assert name in OmegaConf.select(config, parent), key
