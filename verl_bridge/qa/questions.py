"""Reading and checking questions with gold answers, before hours of training find the bad row."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_bridge.qa.answers import is_yes_no, normalise


@dataclass(frozen=True)
class Question:
    """One question; the golds are aliases of one another."""

    id: str
    question: str
    golden_answers: tuple[str, ...]


@dataclass(frozen=True)
class QuestionsReport:
    """What a question file holds.

    Args:
        questions: number of rows.
        aliases: gold aliases in all.
        yes_no: rows whose gold is a bare yes or no: alias hits say nothing there.
        unmatchable: rows whose golds all normalise to nothing, so that no passage can hold them.
        repeated: rows whose question text occurred before.
    """

    questions: int
    aliases: int
    yes_no: int
    unmatchable: int
    repeated: int

    def to_dict(self) -> dict[str, int]:
        """Plain containers, ready for JSON."""
        return asdict(self)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path} line {number} is not JSON ({error}): write one object per line") from None
                yield row


def gold_answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The gold answers of a row: ``golden_answers``, or verl's ``reward_model.ground_truth.target``; text or a list.

    Raises:
        ValueError: no gold answers, or one that is not text or blank; names the row by ``where`` and the fix.
    """
    golds = row.get("golden_answers")
    if golds is None:
        truth = (row.get("reward_model") or {}).get("ground_truth")
        golds = truth.get("target") if isinstance(truth, Mapping) else truth
    golds = [golds] if isinstance(golds, str) else golds
    # verl hands columns on as lists, arrays or tuples
    found = [] if golds is None or isinstance(golds, Mapping) or not hasattr(golds, "__iter__") else list(golds)
    if not found or not all(isinstance(gold, str) and gold.strip() for gold in found):
        raise ValueError(
            f"{where} has gold answers {golds!r}: give at least one non-empty string in 'golden_answers' "
            "(or reward_model.ground_truth.target), or leave the row out"
        )
    return tuple(found)


def _parse(row: Any, where: str, number: int) -> Question:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is not an object: write {{id, question, golden_answers}}")
    question = row.get("question") or (row.get("extra_info") or {}).get("question")
    if question is None and row.get("prompt"):
        question = row["prompt"][-1]["content"]  # verl's chat-form prompt
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where} has no question: fill 'question' with text")
    return Question(str(row.get("id", number - 1)), question, gold_answers(row, where))


def read_questions(path: str | os.PathLike) -> list[Question]:
    """Questions of a JSONL, JSONL.gz or parquet file, with ``golden_answers`` or in verl's columns.

    Raises:
        ValueError: no file or an empty one, or a row without a question or gold answers; names the row and the fix.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"questions file {path} does not exist: give a .jsonl, .jsonl.gz or .parquet file")
    questions = [_parse(row, f"{path} row {number}", number) for number, row in enumerate(_rows(path), 1)]
    if not questions:
        raise ValueError(f"questions file {path} is empty: it needs at least one row")
    return questions


def check_questions(questions: list[Question]) -> QuestionsReport:
    """Counts of what deserves a look before training."""
    return QuestionsReport(
        questions=len(questions),
        aliases=sum(len(q.golden_answers) for q in questions),
        yes_no=sum(is_yes_no(q.golden_answers) for q in questions),
        unmatchable=sum(not any(map(normalise, q.golden_answers)) for q in questions),
        repeated=len(questions) - len({q.question for q in questions}),
    )
