"""Reading and checking questions with gold answers, before hours of training find the bad row."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Question:
    """One question; the golds are aliases of one another. ``split`` is the row's own word, None where it has none."""

    id: str
    question: str
    golden_answers: tuple[str, ...]
    split: str | None = None


def json_rows(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Rows with the place that messages name: a line number in JSONL, a row number in parquet, both from 1.

    A thousand rows are read at a time. ``columns``: of a parquet file, read no others than these.
    """
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        number = 0
        try:
            file = pyarrow.parquet.ParquetFile(path)
            names = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(batch_size=1024, columns=names):
                for row in _batch_rows(batch):
                    number += 1
                    yield f"{path} row {number}", row
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{path} row {number + 1}: not readable as parquet ({error}): write the file again"
            ) from error
        return
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    where = f"{path} line {number}"
                    yield where, _json(line, where)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} line {number + 1}: not a complete gzip file ({error}): pack it again") from error


def _batch_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a pyarrow batch; one by one where one has no Python value, so that the rows before it are read."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, a date after the year 9999
        for start in range(batch.num_rows):
            yield from batch.slice(start, 1).to_pylist()
    else:
        yield from rows


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 ({error.reason}): save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): write one object per line") from None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def stored_golds(row: Mapping[str, Any]) -> Any:
    """``golden_answers`` of a row, or verl's ``reward_model.ground_truth.target``, unchecked; None without either."""
    golds = row.get("golden_answers")
    if golds is None:
        truth = _mapping(row.get("reward_model")).get("ground_truth")
        golds = truth.get("target") if isinstance(truth, Mapping) else truth
    return golds


def gold_answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The gold answers of a row, :func:`stored_golds`, which may be text or a list.

    Raises:
        ValueError: no gold answers, or one that is not text or blank; names the row by ``where`` and the fix.
    """
    return _checked(stored_golds(row), where, "'golden_answers' (or reward_model.ground_truth.target)")


def training_golds(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The gold answers of a row that training reads, in every host: verl's column, whatever ``golden_answers`` says.

    Raises:
        ValueError: as for :func:`gold_answers`.
    """
    golds = stored_golds({"reward_model": row.get("reward_model")})
    return _checked(golds, where, "reward_model.ground_truth.target")


def _checked(golds: Any, where: str, column: str) -> tuple[str, ...]:
    golds = [golds] if isinstance(golds, str) else golds
    # verl hands columns on as lists, arrays or tuples
    found = [] if golds is None or isinstance(golds, Mapping) or not hasattr(golds, "__iter__") else list(golds)
    if not found or not all(isinstance(gold, str) and gold.strip() for gold in found):
        raise ValueError(
            f"{where} has gold answers {golds!r}: give at least one non-empty string in {column}, or leave the row out"
        )
    return tuple(found)


def question_of(row: Mapping[str, Any]) -> str | None:
    """The question of a row: ``extra_info.question``, ``question``, else what its prompt asks; None without one.

    Search-R1's prompt is an instruction that ends in "Question: " and the question; of another prompt it is all.
    """
    question = _mapping(row.get("extra_info")).get("question") or row.get("question")
    prompt = row.get("prompt")
    if question is None and isinstance(prompt, list) and prompt:
        question = _mapping(prompt[-1]).get("content")
        if isinstance(question, str):
            question = question.rpartition("Question:")[2].strip()
    return question if isinstance(question, str) and question.strip() else None


def _parse(row: Any, where: str, number: int) -> Question:
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is not an object: write {{id, question, golden_answers}}")
    question = question_of(row)
    if question is None:
        raise ValueError(f"{where} has no question: fill 'question' with text")
    identifier, split = row.get("id"), row.get("split")
    if split is not None and not isinstance(split, str):
        raise ValueError(f"{where} has split {split!r}: use text, or leave it out")
    found = Question(str(number - 1 if identifier is None else identifier), question, gold_answers(row, where), split)
    try:
        " ".join((found.id, question, *found.golden_answers)).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; tokenizers and parquet refuse it
        raise ValueError(f"{where} is not valid Unicode ({error.reason}): drop the broken \\uXXXX escape") from None
    return found


def read_questions(path: str | os.PathLike) -> list[Question]:
    """Questions of a JSONL, JSONL.gz or parquet file, with ``golden_answers`` or in verl's columns.

    Raises:
        ValueError: no file, an empty or a damaged one, or a row without a question or gold answers; names the line
            (in parquet the row) and the fix.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"questions file {path} does not exist: give a .jsonl, .jsonl.gz or .parquet file")
    questions = [_parse(row, where, number) for number, (where, row) in enumerate(json_rows(path), 1)]
    if not questions:
        raise ValueError(f"questions file {path} is empty: it needs at least one row")
    return questions
