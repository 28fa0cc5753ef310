"""BRIDGE's answer likelihoods: plan first, score once.

ℓ_d, the policy's log-likelihood of the gold answer given document d (METHODS §2.3; exact context [ours]), is needed for
every candidate of every retrieval turn. What precedes the document is the question's prompt, or the trajectory up to
and including the query. With the question alone the same (question, document, answer) comes back across the rollouts of
a group, so the plan lists each sequence once and remembers who needs it. No torch, no host: the caller scores the
plan's sequences with its policy and hands the sums to ``plan.gather``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from verl_bridge.qa.actions import OBSERVATION_TAIL, format_observation
from verl_bridge.retrieval.corpus import Document

Tokenizer = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens around it."""

_BLOCK_END = OBSERVATION_TAIL + "<answer>"


@dataclass(frozen=True)
class RetrievalTurn:
    """One search of one rollout.

    Args:
        key: whatever the caller finds the turn by, such as (row, turn).
        context_ids: token ids of what precedes the document: the question's prompt, or prompt and response up to and
            including the query.
        candidates: the documents retrieved, empty when the retrieval failed.
        gold: the gold answer to score.
        failed: the retrieval ended in an error.
    """

    key: Hashable
    context_ids: tuple[int, ...]
    candidates: tuple[Document, ...]
    gold: str
    failed: bool = False


@dataclass(frozen=True)
class LikelihoodPlan:
    """Sequences to score and who needs which.

    Args:
        turn_keys: the turns that take part, in their order.
        sequences: unique (context ids, answer ids); only the answer's tokens are scored.
        index: per turn and candidate the position in ``sequences``, in the order of ``turn_keys``.
        metrics: ``turns``, ``turns_used``, ``turns_failed``, ``turns_single`` (fewer than two candidates),
            ``turn_share`` (used of the eligible), ``sequences``, ``sequences_saved``, ``tokens``, ``tokens_saved``,
            ``sequences_cut`` (documents shortened to ``max_tokens``), ``turns_without_room`` (trajectories that leave
            no room for a document).
    """

    turn_keys: tuple[Hashable, ...]
    sequences: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    index: tuple[tuple[int, ...], ...]
    metrics: dict[str, float] = field(default_factory=dict)

    def gather(self, log_likelihoods: Sequence[float]) -> list[list[float]]:
        """Log-likelihoods per turn and candidate from one value per sequence.

        Raises:
            ValueError: the number of values is not the number of sequences.
        """
        if len(log_likelihoods) != len(self.sequences):
            raise ValueError(f"{len(log_likelihoods)} log-likelihoods for {len(self.sequences)} planned sequences")
        return [[float(log_likelihoods[i]) for i in row] for row in self.index]


def document_context(document: Document, after_query: bool = False) -> str:
    """The text between context and answer: one information block with the document alone, then the opened answer.

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
    max_turns: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> LikelihoodPlan:
    """Unique sequences ``context <information>d</information> <answer> y*`` for all candidates of all turns.

    Turns without at least two candidates say nothing about ranking and are left out. With ``max_turns`` a uniform
    sample without replacement stands for the rest: means over turns stay unbiased.

    Args:
        turns: the retrieval turns of a batch.
        tokenize: the policy's tokenizer.
        after_query: the contexts are trajectories that end with the query. One that leaves no room for a document is
            left out; with a prompt that is an error.
        max_turns: most turns to use, None for all.
        max_tokens: longest sequence; a longer document loses its tail, the closing tags stay.
        seed: of the sample; pass the step so that batches differ.

    Raises:
        ValueError: a gold answer without tokens, ``max_turns`` < 1, or no room for a document in ``max_tokens``.
    """
    if max_turns is not None and max_turns < 1:
        raise ValueError(f"max_turns is {max_turns}; use at least 1 turn or None for all")
    failed = sum(turn.failed for turn in turns)
    eligible = [turn for turn in turns if not turn.failed and len(turn.candidates) >= 2]
    without_room = 0
    if after_query and max_tokens is not None:
        tail = len(tokenize(_BLOCK_END))
        fitting = [t for t in eligible if max_tokens - len(t.context_ids) - len(tokenize(f" {t.gold}")) > tail]
        without_room, eligible = len(eligible) - len(fitting), fitting
    used = eligible
    if max_turns is not None and max_turns < len(eligible):
        used = [eligible[i] for i in sorted(random.Random(seed).sample(range(len(eligible)), max_turns))]

    blocks: dict[Document, tuple[int, ...]] = {}
    answers: dict[str, tuple[int, ...]] = {}
    cut_contexts: set[int] = set()
    positions: dict[tuple[tuple[int, ...], Document, str], int] = {}
    by_content: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    index, total_tokens = [], 0
    for turn in used:
        if turn.gold not in answers:
            answers[turn.gold] = tuple(tokenize(f" {turn.gold}"))
            if not turn.gold.strip() or not answers[turn.gold]:
                raise ValueError(f"turn {turn.key}: the gold answer {turn.gold!r} has no tokens; give a non-empty gold")
        row = []
        for document in turn.candidates:
            key = (turn.context_ids, document, turn.gold)
            if key not in positions:
                if document not in blocks:
                    blocks[document] = tuple(tokenize(document_context(document, after_query)))
                answer = answers[turn.gold]
                room = None if max_tokens is None else max_tokens - len(turn.context_ids) - len(answer)
                block = _fit(blocks[document], document, after_query, room, tokenize)
                sequence = (turn.context_ids + block, answer)
                positions[key] = by_content.setdefault(sequence, len(by_content))
                if block is not blocks[document]:
                    cut_contexts.add(positions[key])
            row.append(positions[key])
        index.append(tuple(row))

    sequences = tuple(by_content)
    lengths = [len(context) + len(answer) for context, answer in sequences]
    needed = sum(map(len, index))
    total_tokens = sum(lengths[i] for row in index for i in row)
    metrics = {
        "turns": len(turns),
        "turns_used": len(used),
        "turns_failed": failed,
        "turns_single": len(turns) - failed - without_room - len(eligible),
        "turns_without_room": without_room,
        "turn_share": len(used) / len(eligible) if eligible else 0.0,
        "sequences": len(sequences),
        "sequences_saved": needed - len(sequences),
        "tokens": sum(lengths),
        "tokens_saved": total_tokens - sum(lengths),
        "sequences_cut": len(cut_contexts),
    }
    return LikelihoodPlan(tuple(turn.key for turn in used), sequences, tuple(index), metrics)


def _fit(
    block: tuple[int, ...], document: Document, after_query: bool, room: int | None, tokenize: Tokenizer
) -> tuple[int, ...]:
    """The block itself, or the head of its document and the closing tags in ``room`` tokens."""
    if room is None or len(block) <= room:
        return block
    tail = tuple(tokenize(_BLOCK_END))
    head = tuple(tokenize(document_context(document, after_query).removesuffix(_BLOCK_END)))
    if room <= len(tail):
        raise ValueError(f"max_tokens leaves {room} tokens for document {document.id!r}; raise it above the prompt's")
    return head[: room - len(tail)] + tail
