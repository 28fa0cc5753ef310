"""Made-up rollouts with known token positions, and their response mask."""

from __future__ import annotations

import torch

from verl_bridge.trace import SearchTrace, SearchTurn


def trace_of(*steps, answer=None, gold="Lima", extra=2):
    """Turns from ``hit`` | ``miss`` | ``failed`` | ``bad``: four sampled tokens, the first and last of them tags.

    Joined by ``+`` they are parallel calls of one turn: their observations come after all of them.
    """
    turns, position = [], 0
    for step in steps:
        calls = step.split("+")
        seen = position + 4 * len(calls)
        for start, call in zip(range(position, seen, 4), calls, strict=True):
            span, gates, observed = (
                (start, start + 4),
                ((start, start + 1), (start + 3, start + 4)),
                (seen, seen + extra),
            )
            if call == "failed":
                turns.append(SearchTurn("search", span, gates, query="q", status="error"))
                continue
            if call == "bad":
                turns.append(SearchTurn("malformed", span, gates, observation_span=observed))
            else:
                text = f"<information>Doc 1(Title: t) {'Lima' if call == 'hit' else 'Quito'}</information>"
                turns.append(
                    SearchTurn(
                        "search",
                        span,
                        gates,
                        query="q",
                        status="ok",
                        candidate_ids=("a", "b"),
                        candidate_scores=(0.9, 0.8),
                        shown=1,
                        observation_span=observed,
                        observation=text,
                        adapter_version=0,
                    )
                )
            seen += extra
        position = seen
    if answer is not None:
        span = (position, position + 4)
        turns.append(SearchTurn("answer", span, ((position, position + 1), (position + 3, position + 4))))
        position += 4
    return SearchTrace(
        question="capital?",
        golden_answers=(gold,),
        turns=tuple(turns),
        answer=answer,
        answer_span=None if answer is None else (position - 3, position - 1),
        stop_reason="answer" if answer is not None else "max_turns",
        response_length=position,
    )


def masks(traces):
    width = max(trace.response_length for trace in traces)
    mask = torch.zeros(len(traces), width, dtype=torch.int64)
    for row, trace in enumerate(traces):
        for turn in trace.turns:
            mask[row, slice(*turn.span)] = 1
    return mask
