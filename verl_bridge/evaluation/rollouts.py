"""Saved rollouts as traces: Search-R1's in text form, and the ``rollouts/step_N.jsonl`` of a run.

A text has no tokens, so the spans of a trace made from one count **characters**. Which of its parts the model wrote is
told by how Search-R1's loop builds it. A turn ends at its first ``</search>`` or ``</answer>`` (generation stops
there), and what the retriever found is put right behind a ``</search>``. So an ``<information>`` block there was shown
to the model, and a block anywhere else was written by it and is not evidence.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_bridge.qa.actions import (
    CORRECTION,
    NOTHING_FOUND,
    OBSERVATION_HEAD,
    OBSERVATION_TAIL,
    RETRIEVAL_FAILED,
    SEARCH_R1_CORRECTION,
    Action,
    parse_action,
)
from verl_bridge.qa.questions import gold_answers, json_rows
from verl_bridge.trace import SearchTrace, SearchTurn, StopReason

_NOTICES = (CORRECTION, RETRIEVAL_FAILED, NOTHING_FOUND, SEARCH_R1_CORRECTION)
# Where a part of the text ends; what it holds is parse_action's to say. Every search is bounded by its find.
_TURN_END = re.compile("|".join(["</search>", "</answer>", *(f"(?={re.escape(notice)})" for notice in _NOTICES)]))
_BLOCK = re.compile(rf"\s*{re.escape(OBSERVATION_HEAD.strip())}")
_BLOCK_END = re.compile(f"({re.escape(OBSERVATION_TAIL.strip())})(?:\n\n)?|</search>|</answer>")
_WORD = re.compile(r"\S")


@dataclass(frozen=True)
class SavedRollout:
    """One rollout of a file.

    Args:
        id: the row's own id, else its line number.
        group: rollouts of a file with the same group answered the same prompt.
        trace: the record; spans are characters when it was read from text.
        reward: outcome reward, None where the row has none.
        recorded_em: exact match as whoever made the file scored it, None where the row has none.
    """

    id: str
    group: str
    trace: SearchTrace
    reward: float | None
    recorded_em: bool | None


def read_rollouts(path: str | os.PathLike) -> Iterator[SavedRollout]:
    """The rollouts of a JSONL or JSONL.gz file, one at a time.

    A row with ``trace`` is a run's own; any other needs ``question``, ``golden_answers`` and ``response`` and may have
    ``id``, ``stop_reason`` and ``em``.

    Raises:
        ValueError: no file, an empty or a damaged one, or a bad row; names the line and the fix.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"rollouts file {path} does not exist: give a .jsonl or .jsonl.gz file")
    number = 0
    for number, (where, row) in enumerate(json_rows(path), 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"{where} is not an object: write one rollout per line")
        yield _own(row, where, number) if "trace" in row else _text(row, where, number)
    if number == 0:
        raise ValueError(f"rollouts file {path} is empty: it needs at least one row")


def _own(row: Mapping[str, Any], where: str, number: int) -> SavedRollout:
    if not isinstance(row["trace"], Mapping):
        raise ValueError(f"{where} has trace {row['trace']!r}: it must be the object a run saves, or drop the line")
    try:
        trace = SearchTrace.from_dict(row["trace"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}; drop the line, or save the run's rollouts again") from None
    reward = _number(row, "reward", where)
    return SavedRollout(_id(row, number), str(row.get("uid", trace.question)), trace, reward, None)


def _text(row: Mapping[str, Any], where: str, number: int) -> SavedRollout:
    for name in ("question", "response"):
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"{where} has {name} {row.get(name)!r}: a rollout in text form needs question, golden_answers and "
                "response, one saved by a run needs trace"
            )
    em = _number(row, "em", where)
    if em not in (None, 0, 1):
        raise ValueError(f"{where} has em {em!r}: write 0 or 1, or leave it out")
    reason = str(row.get("stop_reason", ""))
    trace = trace_from_text(row["question"], gold_answers(row, where), row["response"], reason)
    return SavedRollout(_id(row, number), trace.question, trace, em, None if em is None else bool(em))


def _id(row: Mapping[str, Any], number: int) -> str:
    return str(number if row.get("id") is None else row["id"])


def _number(row: Mapping[str, Any], name: str, where: str) -> float | None:
    value = row.get(name)
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"{where} has {name} {value!r}: write a number, or leave it out")
    return value


def trace_from_text(question: str, golds: tuple[str, ...], response: str, stop_reason: str = "") -> SearchTrace:
    """The trace of a response in text form; its spans count characters.

    The documents' ids and scores are not in the text: one candidate, ``unknown``, stands for each block. An empty block
    is a failed retrieval. A block that the observation limit left without its closing tag ends where the next
    structural tag begins: what the model wrote in between cannot be told from it.

    Args:
        stop_reason: ``length`` marks a rollout that ran out of tokens; all else is read from the turns.
    """
    turns: list[SearchTurn] = []
    answer, answer_span = None, None
    position, open_search = 0, False  # the last search got no observation: the budget of turns was spent
    while _WORD.search(response, position):
        action = _turn(response, position)
        span = (position, position + action.end)
        tags = tuple((position + start, position + end) for start, end in action.tags)
        if action.kind == "answer":
            turns.append(SearchTurn("answer", span, tags))
            answer = action.content
            answer_span = (position + action.content_start, position + action.content_end)
            break
        record, observed = _observation(response, span[1], action.kind == "search")
        open_search = action.kind == "search" and observed is None
        if action.kind == "search":
            record["query"] = action.content
        if observed is not None:
            record |= {"observation_span": observed, "observation": response[slice(*observed)]}
        turns.append(SearchTurn(action.kind, span, tags, **record))
        position = (observed or span)[1]
    reason: StopReason = "answer"
    if answer is None:
        reason = "length" if stop_reason == "length" else "max_turns" if open_search else "no_action"
    return SearchTrace(question, golds, tuple(turns), answer, answer_span, reason, len(response))


def _turn(response: str, position: int) -> Action:
    """The turn that begins here: up to its first closing tag of an action, a notice of the loop, or the end."""
    end = _TURN_END.search(response, position)
    return parse_action(response[position : end.end() if end else len(response)])


def _observation(response: str, position: int, searched: bool) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """What the loop put behind a turn that ends here: retrieval fields of the turn, and where it stands."""
    for notice in _NOTICES:
        if response.startswith(notice, position):
            status = {RETRIEVAL_FAILED: "error", NOTHING_FOUND: "ok"}.get(notice, "none") if searched else "none"
            return {"status": status}, (position, position + len(notice))
    block = _BLOCK.match(response, position)
    if block is None or not response.endswith("</search>", 0, position):
        return {}, None
    last = _BLOCK_END.search(response, block.end())
    body = response[block.end() : last.end() if last else len(response)]
    tags = parse_action(body).tags
    words = body[: tags[0][0]] if tags else body
    end = block.end() + len(words)
    if last and last[1] and last.start() == end:
        end = last.end()
    if not searched:
        return {}, (position, end)
    if not words.strip():
        return {"status": "error"}, (position, end)
    return {"status": "ok", "candidate_ids": ("unknown",), "candidate_scores": (0.0,), "shown": 1}, (position, end)
