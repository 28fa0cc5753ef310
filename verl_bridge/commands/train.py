"""``verl-bridge train``: verl's trainer with our plugin loaded, or a dry run of it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

DRY_RUN = "--dry-run"


def add(commands: Any) -> None:
    """Adds ``train`` to the parser."""
    command = commands.add_parser(
        "train",
        help="run verl's trainer with Hydra overrides, e.g. train +verl_bridge=bridge_gca data.train_files=…",
        description=(
            "All arguments go to `python -m verl.trainer.main_ppo` as they are. With --dry-run nothing is started: the "
            "config is composed and checked as a run would be up to its workers, and what it comes to is printed; exit "
            "code 0, 1 when only files or servers are missing, 2 when the run would be refused."
        ),
        add_help=False,
        prefix_chars=" ",  # so that --cfg, --config-name and ~key reach Hydra
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Starts verl, or the dry run, on ``options.overrides``; its exit code."""
    from verl_bridge.launch import cpu_environment, training_environment

    overrides = [override for override in options.overrides if override != DRY_RUN]
    dry = len(overrides) < len(options.overrides)
    # In a process of its own: verl reads its platform and plugin variables when it is imported.
    module = "verl_bridge.integrations.verl.dry_run" if dry else "verl.trainer.main_ppo"
    on_cpu = any(override.lstrip("+").startswith("verl_bridge_host=cpu") for override in overrides)
    return subprocess.call(
        [sys.executable, "-m", module, *overrides], env=cpu_environment() if on_cpu else training_environment()
    )
