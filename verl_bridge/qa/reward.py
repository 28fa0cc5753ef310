"""Outcome reward of a search agent: exact match and format, read from the trace and never from the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from verl_bridge.qa.signals import rollout_signals
from verl_bridge.trace import SearchTrace

#: What verl passes to every custom reward function, used or not.
VERL_ARGUMENTS = ("reward_router_address", "reward_model_tokenizer")


@dataclass(frozen=True)
class RewardResult:
    """Reward of one rollout.

    Args:
        score: the reward, in [0, 1].
        em: the answer matches a gold alias.
        format_ok: every turn is well-formed and the last one answers.
        tool_hit: an observation in the context holds a gold alias; never part of ``score``.
        searches: number of well-formed searches.
    """

    score: float
    em: bool
    format_ok: bool
    tool_hit: bool
    searches: int


def score_trace(trace: SearchTrace, format_weight: float = 0.2, wrong_format_bonus: float = 0.0) -> RewardResult:
    """Exact match with a deduction for bad format (Search-R1's EM + format reward).

    Correct and well-formed scores 1, correct but badly formed ``1 - format_weight``, wrong ``0``. A wrong but
    well-formed rollout gets ``wrong_format_bonus``; it is 0 by default, because in a group of wrong rollouts the
    group standardisation blows any bonus up to the size of a right answer [ours].

    Raises:
        ValueError: weights out of range, or a trace without gold answers or with a blank one.
    """
    if not 0 <= format_weight < 1:
        raise ValueError(f"format_weight={format_weight} must lie in [0, 1)")
    if not 0 <= wrong_format_bonus < 1 - format_weight:
        raise ValueError(
            f"wrong_format_bonus={wrong_format_bonus} must lie in [0, 1 - format_weight) = [0, {1 - format_weight:g}): "
            "a wrong answer may not score like a right one"
        )
    if not trace.golden_answers or not all(gold.strip() for gold in trace.golden_answers):
        raise ValueError(
            f"no golden answers for question {trace.question!r}, or a blank one ({trace.golden_answers!r}): "
            "fill reward_model.ground_truth.target"
        )
    signals = rollout_signals(trace)
    format_ok = signals.answered and all(turn.kind != "malformed" for turn in trace.turns)
    if signals.correct:
        score = 1.0 if format_ok else 1.0 - format_weight
    else:
        score = wrong_format_bonus if format_ok else 0.0
    return RewardResult(score, signals.correct, format_ok, signals.hit, len(trace.searches))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    format_weight: float = 0.2,
    wrong_format_bonus: float = 0.0,
    **kwargs: Any,
) -> dict[str, float]:
    """:func:`score_trace` in the signature of verl's ``reward.custom_reward_function``.

    The text and ``ground_truth`` are not read: the trace, a dict in ``extra_info["search_trace"]``, holds the answer
    and the golds. Every row gets the same keys, as verl expects: score, em, format, tool_hit, supcor
    (right with evidence), searches.

    Raises:
        KeyError: no trace.
        ValueError: an unknown setting, weights out of range, an invalid trace or one without gold answers.
    """
    for name in kwargs:
        if name not in VERL_ARGUMENTS:
            known = ("format_weight", "wrong_format_bonus")
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {' and '.join(known)}"
            raise ValueError(f"compute_score has no setting {name}={kwargs[name]!r}: {hint}")
    record = (extra_info or {}).get("search_trace")
    if record is None:
        raise KeyError(
            f"extra_info['search_trace'] is missing for data_source {data_source!r}: this reward scores traces, so "
            "roll out with verl_bridge's agent loop (actor_rollout_ref.rollout.agent.default_agent_loop) or use "
            "another reward.custom_reward_function"
        )
    trace = record if isinstance(record, SearchTrace) else SearchTrace.from_dict(record)
    result = score_trace(trace, format_weight, wrong_format_bonus)
    return {
        "score": result.score,
        "em": float(result.em),
        "format": float(result.format_ok),
        "tool_hit": float(result.tool_hit),
        "supcor": float(result.em and result.tool_hit),
        "searches": float(result.searches),
    }
