"""The one record of a search rollout: made once by a host, read by everyone.

A host (verl's agent loop, verl-tool's, a reader of saved rollouts) builds a :class:`SearchTrace` while it still knows
the exact token positions. Credit, retriever updates, metrics and reports read it; nobody parses rollout text again.

All spans are half-open ``[start, end)`` token positions in the *response* (position 0 is the first sampled token).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal, get_args

Span = tuple[int, int]
TurnKind = Literal["search", "answer", "malformed"]
RetrievalStatus = Literal["ok", "error", "none"]
StopReason = Literal["answer", "max_turns", "length", "no_action", "error"]


def readable(text: str) -> str:
    """The text as tokenizers and files take it: half of a surrogate pair, which JSON can spell, is a question mark."""
    return text.encode("utf-8", "replace").decode()


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(f"invalid search trace: {message}")


def _span(value: Any) -> Span | None:
    if value is None:
        return None
    start, end = value  # two, else ValueError
    if type(start) is not int or type(end) is not int:
        raise TypeError(f"span {value!r} is not two integers")
    return start, end


def _score(value: Any) -> float:
    if type(value) not in (float, int) or not isfinite(value):
        raise TypeError(f"candidate score {value!r} is not a finite number")
    return value


def _strings(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} {value!r} is not a list of strings")
    return tuple(value)


@dataclass(frozen=True)
class SearchTurn:
    """One assistant turn, or one of its parallel tool calls, and, for a search, what came back.

    Args:
        kind: ``search`` (a well-formed query), ``answer`` (the final answer) or ``malformed`` (anything else).
        span: the sampled tokens of the turn, reasoning included.
        tag_spans: tokens of structural literals inside ``span`` (``<think>``, ``</search>``, ...); no credit there.
        query: the search query (kind ``search`` only), made :func:`readable` as every retriever makes it.
        status: ``ok`` (documents came back), ``error`` (the retrieval failed), ``none`` (no retrieval was made).
        candidate_ids: document ids by descending score, at least as many as were shown.
        candidate_scores: their scores, inner products of normalised embeddings.
        shown: how many of the candidates were offered to the model.
        observation_span: the tokens of the observation that entered the context, None when none did.
        observation: the text of exactly those tokens: what the model could read.
        adapter_version: the version of the retriever's adapter that served the query.
    """

    kind: TurnKind
    span: Span
    tag_spans: tuple[Span, ...] = ()
    query: str | None = None
    status: RetrievalStatus = "none"
    candidate_ids: tuple[str, ...] = ()
    candidate_scores: tuple[float, ...] = ()
    shown: int = 0
    observation_span: Span | None = None
    observation: str = ""
    adapter_version: int | None = None

    def __post_init__(self) -> None:
        if self.query is not None:
            object.__setattr__(self, "query", readable(self.query))  # frozen otherwise
        _check(self.kind in get_args(TurnKind), f"kind {self.kind!r} is not one of {get_args(TurnKind)}")
        _check(self.status in get_args(RetrievalStatus), f"status {self.status!r} is not one of ok, error, none")
        start, end = self.span
        _check(0 <= start <= end, f"span {self.span} is not ordered")
        for tag in self.tag_spans:
            _check(start <= tag[0] <= tag[1] <= end, f"tag span {tag} lies outside its turn {self.span}")
        _check((self.kind == "search") == (self.query is not None), f"a {self.kind} turn with query {self.query!r}")
        _check(self.kind == "search" or self.status == "none", f"a {self.kind} turn with retrieval {self.status!r}")
        _check(
            len(self.candidate_ids) == len(self.candidate_scores),
            f"{len(self.candidate_ids)} candidates with {len(self.candidate_scores)} scores",
        )
        _check(self.status == "ok" or not self.candidate_ids, f"candidates on a retrieval with status {self.status!r}")
        _check(
            0 <= self.shown <= len(self.candidate_ids), f"{self.shown} shown of {len(self.candidate_ids)} candidates"
        )
        if self.observation_span is not None:
            _check(
                end <= self.observation_span[0] <= self.observation_span[1],
                f"observation {self.observation_span} starts before its turn {self.span} ends",
            )
        else:
            _check(not self.observation, "observation text without a span: it never entered the context")


@dataclass(frozen=True)
class SearchTrace:
    """One rollout of a search agent.

    Args:
        question: the question as asked.
        golden_answers: its gold answers (aliases of one another).
        turns: the assistant turns in order. Parallel tool calls of one assistant turn are a :class:`SearchTurn` each:
            their spans follow one another without a gap, their observations come in the same order after all of them.
        answer: the final answer's text, None when the rollout gave none.
        answer_span: the tokens of the answer's text.
        stop_reason: ``answer``, ``max_turns`` (budget of turns), ``length`` (budget of tokens), ``no_action`` (the
            model stopped without an action) or ``error``.
        response_length: number of response tokens, sampled and observed.
    """

    question: str
    golden_answers: tuple[str, ...]
    turns: tuple[SearchTurn, ...]
    answer: str | None
    answer_span: Span | None
    stop_reason: StopReason
    response_length: int

    def __post_init__(self) -> None:
        reasons = get_args(StopReason)
        _check(self.stop_reason in reasons, f"stop_reason {self.stop_reason!r} is not one of {reasons}")
        _check((self.answer is None) == (self.stop_reason != "answer"), f"answer with stop_reason {self.stop_reason!r}")
        _check((self.answer is None) == (self.answer_span is None), "answer and answer_span go together")
        sampled = [turn.span for turn in self.turns]
        observed = [turn.observation_span for turn in self.turns if turn.observation_span is not None]
        for spans in (sampled, observed, sorted(sampled + observed)):  # both in order, and neither over the other
            end = 0
            for span in spans:
                _check(span[0] >= end, f"span {span} overlaps what came before position {end}")
                end = span[1]
        _check(end <= self.response_length, f"turns reach token {end} of {self.response_length} response tokens")
        last = self.turns[-1] if self.turns else None
        if self.answer is not None:
            _check(last is not None and last.kind == "answer", "an answer needs a last turn of kind 'answer'")
            _check(
                last.span[0] <= self.answer_span[0] <= self.answer_span[1] <= last.span[1],
                f"answer span {self.answer_span} lies outside the answer turn {last.span}",
            )
        _check(all(turn.kind != "answer" for turn in self.turns[:-1]), "an answer turn before the end")

    @property
    def searches(self) -> tuple[SearchTurn, ...]:
        """The well-formed search turns, in order."""
        return tuple(turn for turn in self.turns if turn.kind == "search")

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchTrace:
        """The inverse of :meth:`to_dict`, also after a round through JSON. Raises ValueError on an invalid record."""
        try:
            turns = tuple(
                SearchTurn(
                    **{
                        **turn,
                        "span": _span(turn["span"]),
                        "tag_spans": tuple(_span(tag) for tag in turn["tag_spans"]),
                        "candidate_ids": _strings(turn["candidate_ids"], "candidate_ids"),
                        "candidate_scores": tuple(map(_score, turn["candidate_scores"])),
                        "observation_span": _span(turn["observation_span"]),
                    }
                )
                for turn in data["turns"]
            )
            return cls(
                **{
                    **data,
                    "golden_answers": _strings(data["golden_answers"], "golden_answers"),
                    "turns": turns,
                    "answer_span": _span(data["answer_span"]),
                }
            )
        except KeyError as error:
            raise ValueError(f"invalid search trace: no {error.args[0]!r}") from error
        except (TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"invalid search trace: {error}") from error
        except ValueError as error:
            if str(error).startswith("invalid search trace"):
                raise
            raise ValueError(f"invalid search trace: {error}") from error
