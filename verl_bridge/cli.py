"""The command ``verl-bridge``: thin. Larger commands are in ``commands``; heavy things are imported when they run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_bridge import __version__
from verl_bridge.commands import bench, data, eval, export, index, serve, train
from verl_bridge.commands.options import add_command, positive
from verl_bridge.config.schema import ARMS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 fine, 1 a check found something, 2 bad input, else of the training run.

    A bad input is one line on stderr; ``VERL_BRIDGE_DEBUG=1`` shows the traceback.
    """
    options, rest = _parser().parse_known_args(argv)
    if rest and options.run is not train.run:
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

    train.add(commands)
    index.add(commands)
    serve.add(commands)
    bench.add(commands)
    eval.add(commands)
    export.add(commands)
    data.add(commands)
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


if __name__ == "__main__":
    sys.exit(main())
