"""BRIDGE's answer likelihoods: plan first, score once.

ℓ_d, the policy's log-likelihood of the gold answer given document d (exact context [ours]), is needed for every
candidate of every retrieval turn. What precedes the document is the question's prompt, or the trajectory up to and
including the query. With the question alone the same (question, document, answer) comes back across the rollouts of a
group, so the plan lists each sequence once and remembers who needs it. With several golds ℓ_d is the largest of
theirs [ours]. No torch, no host: the caller scores the plan's sequences with its policy and hands the sums to
``plan.gather``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from verl_bridge.bilevel.sample import sample_turns
from verl_bridge.qa.actions import OBSERVATION_TAIL, format_observation
from verl_bridge.retrieval.corpus import Document

Tokenizer = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens around it."""

_BLOCK_END = OBSERVATION_TAIL + "<answer>"

MOST_GOLDS = 8  # of one turn; question sets list up to hundreds of aliases


class NoRoomError(ValueError):
    """A prompt leaves no room for a document; the caller knows which settings ``max_tokens`` came from."""


@dataclass(frozen=True)
class RetrievalTurn:
    """One search of one rollout.

    Args:
        key: whatever the caller finds the turn by, such as (row, turn).
        context_ids: token ids of what precedes the document: the question's prompt, or prompt and response up to and
            including the query.
        candidates: the documents retrieved, empty when the retrieval failed.
        golds: the gold answers to score, at least one; ℓ_d is that of the likeliest.
        failed: the retrieval ended in an error.

    Raises:
        ValueError: no golds, or a string in place of several.
    """

    key: Hashable
    context_ids: tuple[int, ...]
    candidates: tuple[Document, ...]
    golds: tuple[str, ...]
    failed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.golds, str) or not self.golds:
            raise ValueError(f"turn {self.key}: golds={self.golds!r}; give a tuple of at least one gold answer")


@dataclass(frozen=True)
class LikelihoodPlan:
    """Sequences to score and who needs which.

    Args:
        turn_keys: the turns that take part, in their order.
        sequences: unique (context ids, answer ids); only the answer's tokens are scored.
        index: per turn and candidate the positions in ``sequences``, one per gold, in the order of ``turn_keys``.
        length_normalize: divide a log-likelihood by the number of the answer's tokens.
        metrics: ``turns``, ``turns_used``, ``turns_failed``, ``turns_single`` (fewer than two candidates),
            ``turn_share`` (used of the eligible), ``sequences``, ``sequences_saved``, ``tokens``, ``tokens_saved``,
            ``sequences_cut`` (documents shortened to ``max_tokens``), ``turns_without_room`` (trajectories or golds
            that leave no room for a document), ``golds_left_out`` (of the turns used, beyond MOST_GOLDS each) and, with
            a budget, ``budget_share`` (tokens over budget).
    """

    turn_keys: tuple[Hashable, ...]
    sequences: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    index: tuple[tuple[tuple[int, ...], ...], ...]
    length_normalize: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def gather(self, log_likelihoods: Sequence[float]) -> list[list[float]]:
        """ℓ_d per turn and candidate, in nats, from one log-likelihood per sequence.

        Raises:
            ValueError: the number of values is not the number of sequences.
        """
        values = self._values(log_likelihoods)
        return [[max(values[i] for i in golds) for golds in row] for row in self.index]

    def spread(self, log_likelihoods: Sequence[float], weights: Sequence[Sequence[float]]) -> list[float]:
        """Weights on the ℓ_d summed onto the sequences: the gradient of Σ weight·ℓ_d in the log-likelihoods.

        With several golds a weight falls on the one that gave ℓ_d, the first of equals.

        Args:
            log_likelihoods: as given to :meth:`gather`.
            weights: per turn and candidate.

        Returns:
            One weight per sequence.

        Raises:
            ValueError: the numbers of values or weights are not the plan's.
        """
        values = self._values(log_likelihoods)
        if [len(row) for row in weights] != [len(row) for row in self.index]:
            raise ValueError("the weights do not fit the plan: give one per turn and candidate, as gather does")
        out = [0.0] * len(self.sequences)
        for row, row_weights in zip(self.index, weights, strict=True):
            for golds, weight in zip(row, row_weights, strict=True):
                best = max(golds, key=values.__getitem__)
                out[best] += float(weight) / self._divisor(best)
        return out

    def _divisor(self, position: int) -> int:
        return len(self.sequences[position][1]) if self.length_normalize else 1

    def _values(self, log_likelihoods: Sequence[float]) -> list[float]:
        if len(log_likelihoods) != len(self.sequences):
            raise ValueError(f"{len(log_likelihoods)} log-likelihoods for {len(self.sequences)} planned sequences")
        return [float(value) / self._divisor(i) for i, value in enumerate(log_likelihoods)]


def document_context(document: Document, after_query: bool = False) -> str:
    """The text between context and answer: one information block with only the document, then the opened answer.

    Args:
        document: the document.
        after_query: the context ends with a query; the block then begins as an observation does in a rollout.
    """
    text = format_observation([document]) + "<answer>"
    return text if after_query else text.removeprefix("\n\n")


def plan_likelihoods(
    turns: Sequence[RetrievalTurn],
    tokenize: Tokenizer,
    *,
    after_query: bool = False,
    max_tokens: int | None = None,
    token_budget: int | None = None,
    length_normalize: bool = False,
    seed: int = 0,
) -> LikelihoodPlan:
    """Unique sequences ``context <information>d</information> <answer> y*`` for all candidates of all turns.

    Turns without at least two candidates say nothing about ranking and are left out. With ``token_budget`` a uniform
    sample without replacement stands for the rest (:func:`~verl_bridge.bilevel.sample.sample_turns`): means over turns
    stay unbiased.

    Args:
        turns: the retrieval turns of a batch.
        tokenize: the policy's tokenizer.
        after_query: the contexts are trajectories that end with the query. One that leaves no room for a document is
            left out; with a prompt that is an error.
        max_tokens: longest sequence; a longer document loses its tail, the closing tags stay. A turn with a gold so
            long that no document fits before it is left out.
        token_budget: about the most tokens of all sequences together; None for no bound.
        length_normalize: divide ℓ_d by the answer's tokens [ours].
        seed: of the sample; pass the step so that batches differ.

    Raises:
        ValueError: a gold answer without tokens, or ``token_budget`` < 1.
        NoRoomError: a prompt alone leaves no room for a document in ``max_tokens``.
    """
    if token_budget is not None and token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; use at least 1 token or None for no bound")
    failed = sum(turn.failed for turn in turns)
    eligible = [turn for turn in turns if not turn.failed and len(turn.candidates) >= 2]
    parts = _Parts(tokenize, after_query, max_tokens)
    without_room = 0
    if max_tokens is not None:
        fitting = [turn for turn in eligible if parts.has_room(turn)]
        without_room, eligible = len(eligible) - len(fitting), fitting
    needs = [parts.positions(turn) for turn in eligible]

    used = range(len(eligible))
    if token_budget is not None:
        unique = [list(dict.fromkeys(i for golds in row for i in golds)) for row in needs]
        used = sample_turns(unique, parts.lengths, token_budget, seed)
    renumbered: dict[int, int] = {}  # the sequences of the turns used, in the order they come
    index = tuple(
        tuple(tuple(renumbered.setdefault(i, len(renumbered)) for i in golds) for golds in needs[turn]) for turn in used
    )
    needed = [i for turn in used for golds in needs[turn] for i in golds]
    tokens = sum(parts.lengths[i] for i in renumbered)
    metrics = {
        "turns": len(turns),
        "turns_used": len(used),
        "turns_failed": failed,
        "turns_single": len(turns) - failed - without_room - len(eligible),
        "turns_without_room": without_room,
        "turn_share": len(used) / len(eligible) if eligible else 0.0,
        "golds_left_out": sum(parts.left_out[eligible[turn].golds] for turn in used),
        "sequences": len(renumbered),
        "sequences_saved": len(needed) - len(renumbered),
        "tokens": tokens,
        "tokens_saved": sum(parts.lengths[i] for i in needed) - tokens,
        "sequences_cut": len(parts.cut & renumbered.keys()),
    }
    if token_budget is not None:
        metrics["budget_share"] = tokens / token_budget
    return LikelihoodPlan(
        turn_keys=tuple(eligible[turn].key for turn in used),
        sequences=tuple(parts.sequence(i) for i in renumbered),
        index=index,
        length_normalize=length_normalize,
        metrics=metrics,
    )


class _Parts:
    """The sequences of a batch as numbered (context, block, answer): every text is tokenised once, and the long
    sequences are written out only for those that get scored."""

    def __init__(self, tokenize: Tokenizer, after_query: bool, max_tokens: int | None) -> None:
        self.tokenize, self.after_query, self.max_tokens = tokenize, after_query, max_tokens
        self.tail: tuple[int, ...] | None = None
        self.ids: dict[tuple[int, ...], int] = {}  # token ids of contexts, blocks and answers to a number
        self.texts: list[tuple[int, ...]] = []
        self.blocks: dict[Document, int] = {}
        self.heads: dict[Document, tuple[int, ...]] = {}
        self.golds: dict[tuple[str, ...], tuple[int, ...]] = {}  # a turn's golds to the numbers of their tokens
        self.left_out: dict[tuple[str, ...], int] = {}
        self.answers: dict[str, int] = {}
        self.known: dict[tuple[int, int, int], int] = {}  # (context, block, answer) to the sequence's number
        self.parts: list[tuple[int, int, int]] = []
        self.lengths: list[int] = []  # tokens of each sequence
        self.cut: set[int] = set()

    def has_room(self, turn: RetrievalTurn) -> bool:
        """Whether a document fits, if only its head. Raises NoRoomError for a prompt, whatever the golds."""
        room = self.max_tokens - len(turn.context_ids) - len(self._tail())
        if room < 2 and not self.after_query:  # of document and gold a token each
            raise NoRoomError(
                f"max_tokens={self.max_tokens} leaves no room for a document beside a prompt of "
                f"{len(turn.context_ids)} tokens: with its closing tags that takes at least "
                f"{self.max_tokens + 2 - room}"
            )
        return room > max(len(self.texts[answer]) for answer in self._answers(turn))

    def positions(self, turn: RetrievalTurn) -> list[tuple[int, ...]]:
        """The numbers of a turn's sequences, per candidate one for each gold."""
        context, answers = self._number(turn.context_ids), self._answers(turn)
        return [
            tuple(self._position(context, document, answer, len(turn.context_ids)) for answer in answers)
            for document in turn.candidates
        ]

    def sequence(self, position: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        context, block, answer = (self.texts[part] for part in self.parts[position])
        return context + block, answer

    def _position(self, context: int, document: Document, answer: int, before: int) -> int:
        block, cut = self._block(document), False
        if self.max_tokens is not None:
            room = self.max_tokens - before - len(self.texts[answer])
            if cut := len(self.texts[block]) > room:
                block = self._number(self._shortened(document, room))
        key = (context, block, answer)
        position = self.known.get(key)
        if position is None:
            position = self.known[key] = len(self.parts)
            self.parts.append(key)
            self.lengths.append(sum(len(self.texts[part]) for part in key))
        if cut:
            self.cut.add(position)
        return position

    def _number(self, ids: tuple[int, ...]) -> int:
        number = self.ids.setdefault(ids, len(self.texts))
        if number == len(self.texts):
            self.texts.append(ids)
        return number

    def _block(self, document: Document) -> int:
        if document not in self.blocks:
            self.blocks[document] = self._number(tuple(self.tokenize(document_context(document, self.after_query))))
        return self.blocks[document]

    def _shortened(self, document: Document, room: int) -> tuple[int, ...]:
        """The head of a document and the closing tags in ``room`` tokens, of which the tags leave some."""
        tail = self._tail()
        if document not in self.heads:
            text = document_context(document, self.after_query).removesuffix(_BLOCK_END)
            self.heads[document] = tuple(self.tokenize(text))
        return self.heads[document][: room - len(tail)] + tail

    def _tail(self) -> tuple[int, ...]:
        if self.tail is None:
            self.tail = tuple(self.tokenize(_BLOCK_END))
        return self.tail

    def _answers(self, turn: RetrievalTurn) -> tuple[int, ...]:
        if turn.golds not in self.golds:
            for gold in turn.golds:
                if gold not in self.answers:
                    ids = tuple(self.tokenize(f" {gold}")) if gold.strip() else ()
                    if not ids:
                        raise ValueError(
                            f"turn {turn.key}: the gold answer {gold!r} has no tokens; give a non-empty one"
                        )
                    self.answers[gold] = self._number(ids)
            distinct = tuple(dict.fromkeys(self.answers[gold] for gold in turn.golds))
            self.golds[turn.golds] = distinct[:MOST_GOLDS]
            self.left_out[turn.golds] = len(distinct[MOST_GOLDS:])
        return self.golds[turn.golds]
