"""The command ``verl-bridge``: thin, one function per command; everything heavy is imported when it runs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_bridge import __version__
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

    doctor = _command(commands, "doctor", _doctor, "check versions, files and the registration with verl")
    doctor.add_argument("--encoder", help="also check that this encoder folder exists")
    doctor.add_argument("--index", help="also check that this index folder is complete")

    demo = _command(commands, "demo", _demo, "train the tiny agent in the offline world and show before and after")
    demo.add_argument("--arm", choices=ARMS, default="bridge_gca")
    demo.add_argument("--steps", type=_positive, help="training steps (default: the demo's own number)")
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

    index = commands.add_parser("index", help="build or check a document index").add_subparsers(
        required=True, metavar="build|check"
    )
    build = _command(index, "build", _index_build, "encode a corpus into an index folder")
    check = _command(index, "check", _index_check, "check that index, corpus and encoder belong together")
    for command in (build, check):
        command.add_argument("--corpus", required=True)
        command.add_argument("--encoder", required=command is build)
        command.add_argument("--passage-prefix", default="", help="put before every passage ('passage: ' for E5)")
        command.add_argument("--out" if command is build else "--index", dest="index", required=True)
    build.add_argument("--factory", default="Flat", help="FAISS factory string")
    build.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    build.add_argument("--batch-size", type=_positive, default=256)
    build.add_argument("--overwrite", action="store_true", help="replace an index that is there")

    query = _command(commands, "query", _query, "search an index")
    query.add_argument("text", nargs="+", help="one or more queries")
    for name in ("--corpus", "--index", "--encoder"):
        query.add_argument(name, required=True)
    query.add_argument("--query-prefix", default="", help="put before every query ('query: ' for E5)")
    query.add_argument("--passage-prefix", default="")
    query.add_argument("--adapter", help="adapter folder of a run")
    query.add_argument("--lora-rank", type=_positive, default=16)
    query.add_argument("--top-k", type=_positive, default=3)

    data = commands.add_parser("data", help="check question files").add_subparsers(required=True, metavar="check")
    data_check = _command(data, "check", _data_check, "read every row and count what deserves a look")
    data_check.add_argument("file", type=Path)
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    command.set_defaults(run=run)
    return command


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _doctor(options: argparse.Namespace) -> int:
    from verl_bridge.doctor import examine

    report = examine(encoder=options.encoder, index=options.index)
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


def _encoder(options: argparse.Namespace) -> Any:
    """The document encoder, loaded without progress bars: an error has to be the first thing to be seen."""
    from transformers.utils import logging

    from verl_bridge.retrieval.encoder import BaseEncoder, DocumentEncoder

    logging.disable_progress_bar()
    return DocumentEncoder(BaseEncoder(options.encoder), passage_prefix=options.passage_prefix)


def _index_build(options: argparse.Namespace) -> int:
    from verl_bridge.retrieval.corpus import Corpus
    from verl_bridge.retrieval.index import DocumentIndex

    def progress(done: int, total: int) -> None:
        print(f"\r{done}/{total} documents", end="\n" if done == total else "", file=sys.stderr, flush=True)

    if Path(options.index).exists() and not options.overwrite:
        raise ValueError(f"{options.index} exists: give --overwrite to replace an index, or another --out")
    index = DocumentIndex.build(
        Corpus.open(options.corpus),
        _encoder(options),
        options.index,
        factory=options.factory,
        dtype=options.dtype,
        batch_size=options.batch_size,
        overwrite=options.overwrite,
        progress=progress,
    )
    return _index_report(options, index)


def _index_check(options: argparse.Namespace) -> int:
    from verl_bridge.retrieval.corpus import Corpus
    from verl_bridge.retrieval.index import DocumentIndex

    corpus = Corpus.open(options.corpus)
    encoder = _encoder(options) if options.encoder else None
    return _index_report(options, DocumentIndex.load(options.index, corpus, encoder))


def _index_report(options: argparse.Namespace, index: Any) -> int:
    result = {"index": str(options.index), "documents": len(index), "dim": index.dim, "manifest": index.manifest}
    print(json.dumps(result) if options.json else f"{options.index}: {len(index)} documents × {index.dim}, in step")
    return 0


def _query(options: argparse.Namespace) -> int:
    from verl_bridge.retrieval.corpus import Corpus
    from verl_bridge.retrieval.encoder import QueryEncoder
    from verl_bridge.retrieval.index import DocumentIndex
    from verl_bridge.retrieval.retriever import Retriever

    corpus, documents = Corpus.open(options.corpus), _encoder(options)
    index = DocumentIndex.load(options.index, corpus, documents)
    queries = QueryEncoder(documents.base, query_prefix=options.query_prefix, lora_rank=options.lora_rank)
    retriever = Retriever(corpus, index, queries, options.top_k)
    if options.adapter:
        retriever.load_adapter(options.adapter, version=1)
    answers = retriever.search(options.text)
    if options.json:
        print(json.dumps({"results": [answer.to_dict() for answer in answers]}))
        return 0
    for text, answer in zip(options.text, answers, strict=True):
        print(f"{text}" + (f": {answer.error}" if answer.error else ""))
        for score, document in zip(answer.scores, answer.documents, strict=True):
            print(f"  {score:.3f}  [{document.id}] {document.title}: {' '.join(document.text.split())[:120]}")
    return 0


def _data_check(options: argparse.Namespace) -> int:
    from verl_bridge.qa.questions import check_questions, read_questions

    report = check_questions(read_questions(options.file)).to_dict()
    print(json.dumps(report) if options.json else "\n".join(f"{name:12} {count}" for name, count in report.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
