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
        required=True, metavar="bridge|estimators|gca|retrieval|salience"
    )
    bridge = add_command(
        bench,
        "bridge",
        _bridge,
        "one update beside a two-state rival; with --traces the tokens that saved rollouts take; with --corpus and "
        "--questions only the retriever, on real passages",
    )
    bridge.add_argument("--context", choices=("question", "prefix"), default="question", help="likelihood_context")
    bridge.add_argument("--rollouts", type=positive, default=128, help="of one update, eight per question")
    bridge.add_argument("--policy", help="folder of policy and tokenizer (default: the demo's)")
    bridge.add_argument("--micro-batch-tokens", type=positive, default=4096, help="tokens of one pass of the policy")
    bridge.add_argument("--repeats", type=positive, default=5, help="updates of each arm, after one that warms up")
    bridge.add_argument("--threads", type=positive, default=1)
    bridge.add_argument("--traces", nargs="+", metavar="FILE", help="a run's rollouts/step_N.jsonl")
    bridge.add_argument("--corpus", type=Path, help="what the traces searched (default: the demo's), or real passages")
    bridge.add_argument("--questions", type=Path, help="questions on --corpus; a third is held out")
    bridge.add_argument("--seeds", type=positive, default=3, help="runs on the questions")
    bridge.add_argument("--encoder", help="for the questions (default: the index's, or all-MiniLM-L6-v2)")
    bridge.add_argument("--index", type=Path, help="of --corpus (default: built once, kept in --work)")
    bridge.add_argument("--work", type=Path, help="folder for the index (default: the cache)")
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
    retrieval.add_argument("--encoder", help="default: the index's, or all-MiniLM-L6-v2, which the tests install")
    retrieval.add_argument("--documents", type=positive, default=60_000, help="size of the synthetic corpus")
    retrieval.add_argument("--clients", type=positive, default=64)
    retrieval.add_argument("--requests", type=positive, default=8_192)
    retrieval.add_argument("--compute-dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    retrieval.add_argument("--threads", type=positive, help="of encoder and search (default: all cores)")
    retrieval.add_argument("--peer", help="address of another server's /retrieve over the same corpus, measured too")
    retrieval.add_argument("--soak", type=int, default=0, help="further requests to watch the server's memory over")
    retrieval.add_argument("--work", type=Path, help="folder for corpus and index (default: the cache)")


def _bridge(options: argparse.Namespace) -> int:
    from verl_bridge.files import cache_dir

    if options.questions:
        from verl_bridge.evaluation.bench_passages import measure_passages

        if options.traces or not options.corpus:
            raise ValueError("--questions goes with --corpus, and without --traces: give the passages they are on")
        report = measure_passages(
            corpus=options.corpus,
            questions=options.questions,
            encoder=_encoder(options),
            index=options.index,
            work=options.work or cache_dir() / "bench",
            seeds=options.seeds,
            threads=options.threads,
            say=_say,
        )
        return _print(report, options.json)
    from verl_bridge.embedded.assets import embedded_assets
    from verl_bridge.embedded.policy import POLICY_DIR

    policy = options.policy or str(POLICY_DIR)
    if options.traces:
        from verl_bridge.evaluation.bench_tokens import measure_tokens

        report = measure_tokens(options.traces, options.corpus or embedded_assets(_say).corpus, policy)
        return _print(report, options.json)
    if options.corpus:
        raise ValueError("--corpus without --questions or --traces: give one, or neither for the cost of an update")
    from verl_bridge.evaluation.bench_bridge import measure_bridge

    assets = embedded_assets(_say)
    sizes = {key: getattr(options, key) for key in ("context", "rollouts", "micro_batch_tokens", "repeats", "threads")}
    report = measure_bridge(corpus=assets.corpus, index=assets.index, policy=policy, say=_say, **sizes)
    return _print(report, options.json)


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

    report = measure(
        corpus=options.corpus,
        index=options.index,
        encoder=_encoder(options),
        documents=options.documents,
        clients=options.clients,
        requests=options.requests,
        work=options.work or cache_dir() / "bench",
        compute_dtype=options.compute_dtype,
        threads=options.threads,
        peer=options.peer,
        soak=options.soak,
        say=_say,
    )
    return _print(report, options.json)


def _say(line: str) -> None:
    print(f"… {line}", file=sys.stderr, flush=True)


def _encoder(options: argparse.Namespace) -> str | None:
    """The encoder named, None for that of an index that is there, else the folder of all-MiniLM-L6-v2."""
    if options.encoder is not None or (options.index is not None and options.index.exists()):
        return options.encoder
    from verl_bridge.embedded.world import encoder_dir

    return str(encoder_dir())


def _print(report: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(report))
        return 0
    for key, value in report.items():
        for name, figure in value.items() if isinstance(value, dict) else [("", value)]:
            print(f"{f'{key} {name}'.strip():36} {format(figure, '.4g') if isinstance(figure, float) else figure}")
    return 0
