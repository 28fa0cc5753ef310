"""Whole runs of verl's own trainer on CPU, as a user starts them, with a trainer that looks at itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from verl_bridge.embedded import demo
from verl_bridge.embedded.assets import embedded_assets
from verl_bridge.trace import SearchTrace

REPOSITORY = Path(__file__).parents[2]
SMALL = demo.Sizes(questions=4, rollouts=4, validation=16)


class Run:
    """A finished training and what its probe wrote, by step."""

    def __init__(self, folder: Path, command: list[str], steps: int) -> None:
        os.environ["PROBE_FILE"] = str(folder / "probe.jsonl")
        demo._train(command, folder, steps, print)
        # verl drops a prompt whose rollout raised and trains on: nothing of ours may raise there
        assert "Error in _run_prompt" not in (folder / "train.log").read_text()
        self.folder = folder
        self.steps: dict[int, dict] = {}
        for line in (folder / "probe.jsonl").read_text().splitlines():
            record = json.loads(line)
            self.steps.setdefault(record["step"], {}).update(record)
        self.metrics = {record["step"]: record["data"] for record in demo._records(folder / "metrics.jsonl")}

    def traces(self, step: int) -> list[SearchTrace]:
        lines = (self.folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        return [SearchTrace.from_dict(json.loads(line)["trace"]) for line in lines]

    def adapter(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Callable[..., Run]]:
    """Starts a run of a file's tests: name of its folder, arm, steps and further overrides."""
    root = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    patch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.e2e.probe_trainer")
    patch.setenv("PYTHONPATH", str(REPOSITORY))
    patch.setenv("PROBE_FILE", "")
    assets = embedded_assets()

    def run(name: str, arm: str, steps: int, *overrides: str) -> Run:
        folder = root / name
        folder.mkdir(parents=True)
        demo.hold_out(assets, SMALL, folder)
        command = demo.training_command(assets, SMALL, arm, steps, 0, folder)
        return Run(folder, [*command, "trainer.v1.trainer_mode=probe_sync", *overrides], steps)

    yield run
    patch.undo()
