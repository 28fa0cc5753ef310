"""What a rollout's trace says about retrieval and answer: the sub-outcomes that GCA routes credit by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_bridge.qa.actions import observed_text
from verl_bridge.qa.answers import alias_hit, exact_match, is_yes_no
from verl_bridge.trace import SearchTrace, SearchTurn


@dataclass(frozen=True)
class Signals:
    """Sub-outcomes of one rollout: H, j* and C of ``algorithms/README.md``.

    Args:
        hit: some observation that entered the context holds a gold alias.
        first_hit_turn: index in ``trace.turns`` of the first such turn, -1 without a hit. Of parallel tool calls in
            one assistant turn it is the last, for a segment is the whole assistant turn [ours].
        correct: the final answer matches a gold alias exactly.
        answered: there is a final answer.
        yes_no: a gold is a bare yes or no, so ``hit`` says nothing.
    """

    hit: bool
    first_hit_turn: int
    correct: bool
    answered: bool
    yes_no: bool


def rollout_signals(trace: SearchTrace, *, unicode: bool = False) -> Signals:
    """Hit, first hit turn and correctness of a rollout [paper].

    Only what the retriever returned *and* the model could read counts [ours]: text cut off or dropped before the
    context, failed retrievals and information blocks that the model wrote itself are not hits. ``unicode`` chooses the
    normalisation that evidence is found with (:mod:`verl_bridge.qa.answers`); correctness is Search-R1's exact match
    always, the one that the reward counts.
    """
    first_hit_turn = next(
        (
            _last_call(trace.turns, index)
            for index, turn in enumerate(trace.turns)
            if turn.shown and alias_hit(observed_text(turn.observation), trace.golden_answers, unicode=unicode)
        ),
        -1,
    )
    return Signals(
        hit=first_hit_turn >= 0,
        first_hit_turn=first_hit_turn,
        correct=exact_match(trace.answer, trace.golden_answers),
        answered=trace.answer is not None,
        yes_no=is_yes_no(trace.golden_answers),
    )


def _last_call(turns: Sequence[SearchTurn], index: int) -> int:
    """The last call of the assistant turn that call ``index``, whose observation has text, belongs to [ours].

    The next call starts where this one ends, so no observation lies between them: they were sampled together.
    """
    while index + 1 < len(turns) and turns[index + 1].span[0] == turns[index].span[1]:
        if turns[index + 1].kind == "answer":
            break
        index += 1
    return index


def tool_use_warning(traces: Sequence[SearchTrace], limit: float = 0.9) -> str | None:
    """A message when at least ``limit`` of the rollouts made no well-formed search, None otherwise.

    Usually the prompt or chat template does not match the tags, so that no search is ever recognised.
    """
    if not traces:
        return None
    without = sum(not trace.searches for trace in traces)
    malformed = sum(any(turn.kind == "malformed" for turn in trace.turns) for trace in traces)
    share = without / len(traces)
    if share < limit:
        return None
    return (
        f"{without} of {len(traces)} rollouts ({share:.0%}) never searched and {malformed} hold malformed turns: "
        "check that the prompt asks for <search> query </search> and that the chat template and stop tokens fit"
    )
