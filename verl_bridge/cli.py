"""The command ``verl-bridge``: thin. Larger commands are in ``commands``; heavy things are imported when they run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_bridge import __version__
from verl_bridge.commands import bench, eval, index, serve
from verl_bridge.commands.options import add_command, positive
from verl_bridge.config.schema import ARMS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 fine, 1 a check found something, 2 bad input, else of the training run.

    A bad input is one line on stderr; ``VERL_BRIDGE_DEBUG=1`` shows the traceback.
    """
    options, rest = _parser().parse_known_args(argv)
    if rest and options.run is not _train:
        _parser().error(f"unrecognized arguments: {' '.join(rest)}")
    options.overrides = rest
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, KeyError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("VERL_BRIDGE_DEBUG") == "1":
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"verl-bridge: {message}", file=sys.stderr)
        return 2
    except Exception as error:  # nobody foresaw it: 1 stays for checks, and the type says most
        if os.environ.get("VERL_BRIDGE_DEBUG") == "1":
            raise
        reason = " ".join(str(error).split())
        print(
            f"verl-bridge: {type(error).__name__}: {reason}; VERL_BRIDGE_DEBUG=1 shows the traceback", file=sys.stderr
        )
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-bridge", description="Search agents trained with verl: BRIDGE and grounded credit assignment."
    )
    parser.add_argument("--version", action="version", version=f"verl-bridge {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = add_command(commands, "doctor", _doctor, "check versions, files and the registration with verl")
    doctor.add_argument("--encoder", help="also check that this encoder folder exists")
    doctor.add_argument("--index", help="also check that this index folder is complete")
    doctor.add_argument("--url", help="also check that the retrieval servers at this address (or several) answer")

    demo = add_command(commands, "demo", _demo, "train the tiny agent in the offline world and show before and after")
    demo.add_argument("--arm", choices=ARMS, default="bridge_gca")
    demo.add_argument("--steps", type=positive, help="training steps (default: the demo's own number)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--out", type=Path, help="output folder (default: runs/demo-ARM-seedSEED, numbered)")
    demo.add_argument("--corpus", type=Path, help="your own corpus, JSONL or JSONL.gz")
    demo.add_argument("--questions", type=Path, help="your own questions, JSONL, JSONL.gz or parquet")

    train = commands.add_parser(
        "train",
        help="run verl's trainer with Hydra overrides, e.g. train +verl_bridge=bridge_gca data.train_files=…",
        description="All arguments go to `python -m verl.trainer.main_ppo` as they are.",
        add_help=False,
        prefix_chars=" ",  # so that --cfg, --config-name and ~key reach Hydra
    )
    train.set_defaults(run=_train)

    index.add(commands)
    serve.add(commands)
    bench.add(commands)
    eval.add(commands)

    data = commands.add_parser("data", help="check question files").add_subparsers(required=True, metavar="check")
    data_check = add_command(data, "check", _data_check, "read every row and count what deserves a look")
    data_check.add_argument("file", type=Path)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from verl_bridge.doctor import examine

    report = examine(encoder=options.encoder, index=options.index, url=options.url)
    print(json.dumps(report.to_dict()) if options.json else report.table())
    return 0 if report.ok else 1


def _demo(options: argparse.Namespace) -> int:
    from verl_bridge.embedded import demo

    summary = demo.run(
        arm=options.arm,
        steps=options.steps,
        seed=options.seed,
        out=options.out,
        corpus=options.corpus,
        questions=options.questions,
    )
    if options.json:
        print(json.dumps(summary))
    return 0


def _train(options: argparse.Namespace) -> int:
    from verl_bridge.launch import cpu_environment, training_environment

    # In a process of its own: verl reads its platform and plugin variables when it is imported.
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *options.overrides]
    on_cpu = any(override.lstrip("+") == "verl_bridge_host=cpu" for override in options.overrides)
    return subprocess.call(command, env=cpu_environment() if on_cpu else training_environment())


def _data_check(options: argparse.Namespace) -> int:
    from verl_bridge.qa.questions import check_questions, read_questions

    report = check_questions(read_questions(options.file)).to_dict()
    print(json.dumps(report) if options.json else "\n".join(f"{name:12} {count}" for name, count in report.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
