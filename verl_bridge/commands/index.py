"""``verl-bridge index build|check`` and ``verl-bridge query``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_bridge.commands.options import (
    add_command,
    add_encoder_arguments,
    add_retriever_arguments,
    encoder_settings,
    positive,
    retriever_settings,
)
from verl_bridge.config.schema import RetrieverConfig

TOKEN = RetrieverConfig.token_env


def add(commands: Any) -> None:
    """Adds ``index`` and ``query`` to the parser."""
    index = commands.add_parser("index", help="build or check a document index").add_subparsers(
        required=True, metavar="build|check"
    )
    build = add_command(index, "build", _build, "encode a corpus into an index folder, or continue doing so")
    build.add_argument("--corpus", required=True, help="JSONL or JSONL.gz")
    build.add_argument("--out", dest="index", required=True, help="the index folder")
    add_encoder_arguments(build, required=True)
    build.add_argument("--factory", default="Flat", help="FAISS factory string (default: exact search, without FAISS)")
    build.add_argument("--search-parameters", default="", help="kept with the index, such as nprobe=32 or efSearch=64")
    build.add_argument("--dtype", choices=("float32", "float16"), default="float16", help="of the stored vectors")
    build.add_argument("--batch-size", type=positive, default=256, help="documents encoded between two records")
    build.add_argument("--overwrite", action="store_true", help="replace an index that is there")
    build.add_argument("--restart", action="store_true", help="throw away an interrupted build instead of continuing")

    check = add_command(index, "check", _check, "check an index's files, and that corpus and encoder belong to it")
    check.add_argument("--corpus", required=True, help="JSONL or JSONL.gz")
    check.add_argument("--index", required=True, help="index folder, or a FAISS file such as e5_Flat.index")
    add_encoder_arguments(check, required=False)

    query = add_command(commands, "query", _query, "search an index, or a running server")
    query.add_argument("text", nargs="+", help="one or more queries")
    query.add_argument("--url", help=f"ask this server instead; ${TOKEN} is its bearer token, if it wants one")
    add_retriever_arguments(query, required=False)
    query.add_argument("--adapter", help="adapter folder of a run")
    query.add_argument("--top-k", type=positive, default=3)


def _build(options: argparse.Namespace) -> int:
    from verl_bridge.retrieval.build import build_index
    from verl_bridge.retrieval.corpus import Corpus
    from verl_bridge.retrieval.encoder import load_encoders

    if Path(options.index).exists() and not options.overwrite:
        raise ValueError(f"{options.index} exists: give --overwrite to replace an index, or another --out")
    corpus = Corpus.open(options.corpus)
    queries, documents = load_encoders(options.encoder, **encoder_settings(options))
    show, close = _progress_bar()
    try:
        manifest = build_index(
            corpus,
            documents,
            options.index,
            factory=options.factory,
            dtype=options.dtype,
            batch_size=options.batch_size,
            query_prefix=queries.query_prefix,
            search_parameters=options.search_parameters,
            overwrite=options.overwrite,
            restart=options.restart,
            progress=show,
        )
    finally:
        close()
    return _report(options, manifest, "built")


def _progress_bar() -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """A bar on stderr: how to move it, and how to end it, also when it never began."""
    from tqdm import tqdm

    bars: list[Any] = []

    def show(done: int, total: int) -> None:
        if not bars:  # at the first call, so that what an interrupted build did does not count as speed
            pause = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log file needs few lines
            bars.append(tqdm(total=total, initial=done, unit=" documents", mininterval=pause, file=sys.stderr))
        bars[0].update(done - bars[0].n)

    return show, lambda: [bar.close() for bar in bars]


def _check(options: argparse.Namespace) -> int:
    from verl_bridge.retrieval.corpus import Corpus
    from verl_bridge.retrieval.encoder import load_encoders
    from verl_bridge.retrieval.index import compare_vectors, open_index
    from verl_bridge.retrieval.manifest import encoder_settings as settings_for

    corpus = Corpus.open(options.corpus)
    stored = open_index(options.index, corpus)
    worst = None
    if options.encoder:
        settings = settings_for(options.index, encoder_settings(options))
        _, documents = load_encoders(options.encoder, **settings)
        stored = open_index(options.index, corpus, documents, verify=False)
        worst = compare_vectors(stored, corpus, documents)
    return _report(options, stored.manifest, "in step", None if worst is None else worst[0])


def _report(options: argparse.Namespace, manifest: dict[str, Any], state: str, cosine: float | None = None) -> int:
    documents, dim = manifest["documents"], manifest["dim"]
    result = {"index": str(options.index), "documents": documents, "dim": dim, "manifest": manifest}
    if cosine is not None:
        result["lowest_cosine"] = cosine
    line = f"{options.index}: {documents} documents × {dim}, {state}"
    if cosine is not None:
        line += f"; documents encoded again agree (lowest cosine {cosine:.4f})"
    print(json.dumps(result) if options.json else line)
    return 0


def _query(options: argparse.Namespace) -> int:
    if bool(options.url) == bool(options.corpus or options.index):
        raise ValueError("give --corpus and --index to search here, or only --url to ask a server")
    if options.url and options.adapter:
        raise ValueError(f"--adapter={options.adapter} with --url: `verl-bridge publish` sends an adapter to a server")
    answers = _ask(options) if options.url else _search(options)
    if options.json:
        print(json.dumps({"results": answers}))
    for text, answer in zip(options.text, () if options.json else answers, strict=not options.json):
        print(f"{text}" + (f": {answer['error']}" if answer["error"] else ""))
        for score, document in zip(answer["scores"], answer["documents"], strict=True):
            text = " ".join(document["text"].split())[:120]
            print(f"  {score:.3f}  [{document['id']}] {document['title']}: {text}")
    return 1 if all(answer["status"] == "error" for answer in answers) else 0


def _search(options: argparse.Namespace) -> list[dict[str, Any]]:
    from verl_bridge.retrieval.retriever import open_retriever

    if not (options.corpus and options.index):
        raise ValueError(f"--corpus={options.corpus} and --index={options.index}: give both")
    retriever = open_retriever(**retriever_settings(options), top_k=options.top_k)
    if options.adapter:
        retriever.load_adapter(options.adapter, version=1)
    return [answer.to_dict() for answer in retriever.search(options.text)]


def _ask(options: argparse.Namespace) -> list[dict[str, Any]]:
    from verl_bridge.retrieval.client import RetrievalClient

    client = RetrievalClient(options.url, token=os.environ.get(TOKEN) or None)
    return client.search_sync(options.text, options.top_k)
