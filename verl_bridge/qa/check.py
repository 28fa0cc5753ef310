"""What is wrong with a question file, row by row, before a training run or its reward finds out.

What passes without an error, training accepts: golds are read by :func:`~verl_bridge.qa.questions.gold_answers`, the
question by :func:`~verl_bridge.qa.questions.question_of`, as the agent loop and the start of a run read them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from verl_bridge.qa.answers import is_yes_no, normalise
from verl_bridge.qa.questions import gold_answers, json_rows, question_of, stored_golds

#: Sources of Search-R1's files, and of verl-tool's and verl's own (their rewards know no other).
DATA_SOURCES = frozenset(
    prefix + name
    for prefix in ("", "searchR1_")
    for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
)
#: Every kind of fault: whether training fails or is spoilt by it (an error), and what to do.
FAULTS: dict[str, tuple[bool, str]] = {
    "no_object": (True, "write an object: {prompt, reward_model, data_source, extra_info}"),
    "golds_missing": (True, "fill reward_model.ground_truth.target (golden_answers outside verl) or drop the row"),
    "golds_type": (True, "give text, or a list of texts: numbers and dates as text too"),
    "golds_blank": (True, "remove blank golds, and the row if none is left"),
    "reward_model_type": (True, "store reward_model as an object, not as its JSON: {ground_truth: {target: [text]}}"),
    "golds_printed": (True, "this is a printed list or array, which no answer equals: store the list itself"),
    "question_missing": (True, "fill the question; it is read from extra_info.question, question or the prompt"),
    "prompt_type": (True, "give a list of messages: [{role: user, content: text}]"),
    "prompt_tags": (True, "the prompt must say how to act, with <search> and <answer> tags (none: --function-calls)"),
    "prompt_long": (True, "shorten it or raise data.max_prompt_length: verl drops such rows or stops"),
    "source_missing": (True, "fill data_source with text: verl's reward manager asks for it"),
    "extra_info_type": (True, "make extra_info an object, or leave it out"),
    "agent_name": (True, "drop the column agent_name: by it rows choose a loop that writes no search traces"),
    "not_unicode": (True, "drop the broken \\uXXXX escape"),
    "overlap": (True, "the question is in a file given before: take it out of one, or the measure is spoilt"),
    "golds_differ": (False, "golden_answers and reward_model.ground_truth.target say different things"),
    "golds_bracketed": (False, "looks like a printed array or object: if it is one, store the list itself"),
    "golds_unmatchable": (False, "normalised, no gold has a word left: no passage can hold one"),
    "source_unknown": (False, "Search-R1's and verl's rewards know no such source; the reward of verl_bridge does"),
    "repeated_question": (False, "the question occurred before in this file"),
    "repeated_id": (False, "the id occurred before with this data_source"),
}
COLUMNS = ("prompt", "reward_model", "data_source", "extra_info", "agent_name", "id", "question", "golden_answers")
_TAGS = ("<search>", "<answer>")
#: The faults of a row's prompt, as (kind, what is said).
PromptFaults = Callable[[Any], Iterator[tuple[str, str]]]
_PRINTED = re.compile(r"\s*(?:np\.)?(?:array\()?\[(['\"]).*\1[^'\"]*\]", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """One fault of one row. ``kind`` is a key of :data:`FAULTS`; ``row`` counts from 1 (in JSONL the line)."""

    kind: str
    row: int
    says: str


@dataclass
class FileReport:
    """What a file holds.

    Args:
        file: its path.
        form: ``verl`` (prompt and reward_model: what verl trains on) or ``questions`` (question and golden_answers).
        rows: rows read.
        aliases: gold aliases in all.
        yes_no: rows whose gold is a bare yes or no: alias hits say nothing there.
        gold_forms: rows by how their golds are stored: ``list``, ``text``, ``tuple``, ``ndarray``.
        sources: rows by data_source.
        counts: faulty rows by kind.
        faults: the first faults of each kind, as many as were asked for.
    """

    file: str
    form: str
    rows: int = 0
    aliases: int = 0
    yes_no: int = 0
    gold_forms: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)

    @property
    def errors(self) -> int:
        """Faulty rows over all kinds that are errors (a row with two counts twice)."""
        return sum(count for kind, count in self.counts.items() if FAULTS[kind][0])

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        faults = {
            kind: {
                "error": FAULTS[kind][0],
                "count": count,
                "fix": FAULTS[kind][1],
                "rows": [{"row": fault.row, "says": fault.says} for fault in self.faults if fault.kind == kind],
            }
            for kind, count in sorted(self.counts.items())
        }
        names = ("file", "form", "rows", "aliases", "yes_no")
        return {
            **{name: getattr(self, name) for name in names},
            "gold_forms": dict(self.gold_forms),
            "sources": dict(self.sources),
            "errors": self.errors,
            "faults": faults,
        }


def check_files(
    files: Sequence[Path],
    *,
    keep: int | None = 5,
    function_calls: bool = False,
    prompt_tokens: Callable[[list], int] | None = None,
    limit: int = 0,
) -> list[FileReport]:
    """Checks each file, and the later ones for questions of the earlier ones.

    Rows are streamed; what is kept of each is a few numbers (some 200 bytes).

    Args:
        files: JSONL, JSONL.gz or parquet files: training data first, then what it is measured on.
        keep: faults of each kind kept with their row; None keeps all.
        function_calls: the model searches by function calls, so prompts need not explain tags.
        prompt_tokens: tokens of a prompt's messages, to compare with ``limit``; None asks nothing about length.
        limit: largest number of tokens of a prompt (``data.max_prompt_length``).

    Raises:
        ValueError: a file is missing, empty or unreadable; names it, the row where reading stopped, and the fix.
    """
    seen: dict[bytes, tuple[int, int]] = {}
    tags = () if function_calls else _TAGS
    look = partial(_prompt_faults, tags=tags, prompt_tokens=prompt_tokens, limit=limit)
    return [_check_file(Path(file), number, seen, keep, look) for number, file in enumerate(files)]


def _check_file(
    path: Path,
    number: int,
    seen: dict[bytes, tuple[int, int]],
    keep: int | None,
    prompt_faults: PromptFaults,
) -> FileReport:
    if not path.is_file():
        raise ValueError(f"questions file {path} does not exist: give a .jsonl, .jsonl.gz or .parquet file")
    rows = json_rows(path, COLUMNS)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"questions file {path} is empty: it needs at least one row")
    of_verl = isinstance(first[1], Mapping) and bool({"prompt", "reward_model"} & set(first[1]))
    report = FileReport(str(path), "verl" if of_verl else "questions")
    ids: set[bytes] = set()
    for where, row in chain([first], rows):
        place = int(where.rpartition(" ")[2])
        report.rows += 1
        for kind, says in _row_faults(row, place, number, report, seen, ids, prompt_faults):
            report.counts[kind] += 1
            if keep is None or report.counts[kind] <= keep:
                report.faults.append(Fault(kind, place, says))
    return report


def _row_faults(
    row: Any,
    place: int,
    number: int,
    report: FileReport,
    seen: dict[bytes, tuple[int, int]],
    ids: set[bytes],
    prompt_faults: PromptFaults,
) -> Iterator[tuple[str, str]]:
    if not isinstance(row, Mapping):
        yield "no_object", f"{_short(row)} is not an object"
        return
    of_verl = report.form == "verl"
    # The agent loop and the start of a run know only verl's column.
    golds_row = {"reward_model": row.get("reward_model")} if of_verl else row
    golds: tuple[str, ...] = ()
    try:
        golds = gold_answers(golds_row, "the row")
    except ValueError:
        reward_model = row.get("reward_model") if of_verl else None
        if reward_model is not None and not isinstance(reward_model, Mapping):
            yield "reward_model_type", f"reward_model {_short(reward_model)} ({type(reward_model).__name__})"
        else:
            yield _gold_fault(stored_golds(golds_row))
    else:
        yield from _look_at_golds(golds, stored_golds(golds_row), row if of_verl else {}, report)
    if of_verl:
        yield from _verl_faults(row, report)
        yield from prompt_faults(row.get("prompt"))
    question = question_of(row)
    if question is None:
        yield "question_missing", "no question"
    texts = [text for text in (question, *golds) if text is not None]
    if of_verl and _odd_prompt(row.get("prompt")) is None:
        texts += [message["content"] for message in row["prompt"]]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; tokenizers and parquet refuse it
        yield "not_unicode", f"not valid Unicode ({error.reason})"
    if question is not None:
        before = seen.setdefault(_digest(" ".join(question.casefold().rstrip("? \n").split())), (number, place))
        if before[0] != number:
            yield "overlap", f"{_short(question)} is row {before[1]} of file {before[0] + 1}"
        elif before[1] != place:
            yield "repeated_question", f"{_short(question)} is row {before[1]} already"
    if row.get("id") is not None:
        key = _digest(f"{row.get('data_source')}\0{row['id']}")
        if key in ids:
            yield "repeated_id", f"id {_short(row['id'])} of {row.get('data_source')!r}"
        ids.add(key)


def _gold_fault(stored: Any) -> tuple[str, str]:
    says = f"gold answers {_short(stored)}"
    if stored is None or (not isinstance(stored, str | Mapping) and hasattr(stored, "__len__") and not len(stored)):
        return "golds_missing", says
    values = [stored] if isinstance(stored, str | Mapping) or not hasattr(stored, "__iter__") else list(stored)
    odd = [value for value in values if not isinstance(value, str)]
    return ("golds_type", f"{says} ({type(odd[0]).__name__})") if odd else ("golds_blank", says)


def _look_at_golds(
    golds: tuple[str, ...], stored: Any, row: Mapping[str, Any], report: FileReport
) -> Iterator[tuple[str, str]]:
    report.aliases += len(golds)
    report.yes_no += is_yes_no(golds)
    report.gold_forms["text" if isinstance(stored, str) else type(stored).__name__] += 1
    printed = [gold for gold in golds if _PRINTED.match(gold)]
    if printed:
        yield "golds_printed", f"gold answer {_short(printed[0])}"
    elif bracketed := [gold for gold in golds if _bracketed(gold)]:
        yield "golds_bracketed", f"gold answer {_short(bracketed[0])}"
    if not any(map(normalise, golds)):
        yield "golds_unmatchable", f"gold answers {_short(list(golds))}"
    if row.get("golden_answers") is not None:
        try:
            others: tuple[str, ...] | None = gold_answers({"golden_answers": row["golden_answers"]}, "the row")
        except ValueError:
            others = None
        if others is None or set(others) != set(golds):
            yield "golds_differ", f"golden_answers {_short(row['golden_answers'])}, target {_short(list(golds))}"


def _bracketed(gold: str) -> bool:
    """Whether it may be a printed array or object: Python and numpy put them in brackets."""
    text = gold.strip()
    return text.startswith(("array(", "np.array(")) or text[:1] + text[-1:] in ("[]", "{}")


def _verl_faults(row: Mapping[str, Any], report: FileReport) -> Iterator[tuple[str, str]]:
    """Faults in the columns that verl itself reads, besides golds and prompt."""
    source = row.get("data_source")
    if not isinstance(source, str) or not source.strip():
        yield "source_missing", f"data_source {_short(source)}"
    else:
        report.sources[source] += 1
        if source not in DATA_SOURCES:
            yield "source_unknown", f"data_source {_short(source)}"
    if row.get("extra_info") is not None and not isinstance(row["extra_info"], Mapping):
        yield "extra_info_type", f"extra_info {_short(row['extra_info'])}"
    if "agent_name" in row:
        yield "agent_name", f"agent_name {_short(row['agent_name'])}"


def _odd_prompt(prompt: Any) -> str | None:
    """What of a prompt is not a list of messages with text; None where all is well."""
    if not isinstance(prompt, list) or not prompt:
        return f"prompt {_short(prompt)}"
    for message in prompt:
        plain = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not plain or not isinstance(message.get("content"), str):
            return f"message {_short(message)}"
    return None


def _prompt_faults(
    prompt: Any, *, tags: Sequence[str], prompt_tokens: Callable[[list], int] | None, limit: int
) -> Iterator[tuple[str, str]]:
    odd = _odd_prompt(prompt)
    if odd is not None:
        yield "prompt_type", odd
        return
    text = " ".join(message["content"] for message in prompt)
    missing = [tag for tag in tags if tag not in text]
    if missing:
        yield "prompt_tags", f"no {' and no '.join(missing)} in {_short(text)}"
    if prompt_tokens is not None and (length := prompt_tokens(prompt)) > limit:
        yield "prompt_long", f"{length} tokens, {limit} fit"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _short(value: Any, limit: int = 80) -> str:
    """The value on one line, cut: a row may hold anything."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def table(reports: Iterable[FileReport], *, every: bool) -> str:
    """The reports for reading; ``every``: all faults are listed, so no line says that there are more."""
    lines = []
    for report in reports:
        form = "verl's columns" if report.form == "verl" else "questions with golden_answers (not verl's columns)"
        lines.append(f"{report.file}: {report.rows} rows, {form}; {report.aliases} golds, {report.yes_no} yes/no rows")
        stored = ", ".join(f"{count} {name}" for name, count in report.gold_forms.most_common())
        sources = ", ".join(f"{name} {count}" for name, count in report.sources.most_common(10))
        lines += [f"  golds stored as {stored}"] * bool(stored) + [f"  data_source: {sources}"] * bool(sources)
        for kind, (error, fix) in FAULTS.items():
            if count := report.counts[kind]:
                lines.append(f"  {'ERROR' if error else 'note '} {kind}: {count} — {fix}")
                kept = [fault for fault in report.faults if fault.kind == kind]
                lines += [f"    row {fault.row}: {fault.says}" for fault in kept]
                if len(kept) < count and not every:
                    lines.append(f"    … {count - len(kept)} more (--all lists them)")
        if not report.counts:
            lines.append("  nothing wrong")
    return "\n".join(lines)
