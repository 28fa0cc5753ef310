"""What counts as a hit, and the other sub-outcomes."""

from types import SimpleNamespace

import pytest

from verl_bridge.qa.actions import format_observation
from verl_bridge.qa.signals import Signals, rollout_signals, tool_use_warning
from verl_bridge.trace import SearchTrace, SearchTurn


def rollout(*observations, golds=("Lima",), answer=None, stop_reason=None):
    """One search a given observation (None: never entered the context; a turn: as it is), then the answer."""
    turns, position = [], 0
    for item in observations:
        if isinstance(item, SearchTurn):
            turns.append(item)
        else:
            seen = item is not None
            turns.append(
                SearchTurn(
                    kind="search",
                    span=(position, position + 5),
                    query="q",
                    status="ok",
                    candidate_ids=("d",),
                    candidate_scores=(1.0,),
                    shown=1,
                    observation_span=(position + 5, position + 9) if seen else None,
                    observation=item or "",
                )
            )
        position = (turns[-1].observation_span or turns[-1].span)[1]
    if answer is not None:
        turns.append(SearchTurn(kind="answer", span=(position, position + 3)))
    return SearchTrace(
        question="q",
        golden_answers=golds,
        turns=tuple(turns),
        answer=answer,
        answer_span=None if answer is None else (position + 1, position + 2),
        stop_reason=stop_reason or ("max_turns" if answer is None else "answer"),
        response_length=position + 3,
    )


def block(*pairs):
    return format_observation([SimpleNamespace(id="0", title=title, text=text) for title, text in pairs])


def test_first_hit_turn_and_correctness():
    trace = rollout(block(("Peru", "A country.")), block(("Lima", "A city.")), block(("Lima", "Again")), answer="lima.")
    assert rollout_signals(trace) == Signals(True, 1, True, True, False)


def test_no_hit_no_answer():
    trace = rollout(block(("Peru", "A country.")), stop_reason="length")
    assert rollout_signals(trace) == Signals(False, -1, False, False, False)


def test_no_search_at_all():
    assert rollout_signals(rollout(answer="Lima")) == Signals(False, -1, True, True, False)


def test_a_dropped_observation_is_no_hit():
    trace = rollout(None, answer="Lima")
    assert rollout_signals(trace).hit is False


def test_an_alias_in_the_tail_that_was_cut_off_is_no_hit():
    whole = block(("Peru", "Its capital is Lima"))
    assert rollout_signals(rollout(whole)).hit is True
    assert rollout_signals(rollout(whole[: whole.index("Lima")])).hit is False
    assert rollout_signals(rollout(whole[: whole.index("ima")])).hit is False


def test_an_alias_at_the_edge_of_the_block_is_a_hit():
    # "Lima</information>" must not become one word
    assert rollout_signals(rollout(block(("Peru", "capital Lima")))).hit is True
    assert rollout_signals(rollout("<information>Lima is large</information>")).hit is True


@pytest.mark.parametrize("gold", ["Doc", "Title", "1", "information"])
def test_the_words_of_the_observations_form_are_no_evidence(gold):
    assert rollout_signals(rollout(block(("Peru", "a country")), golds=(gold,))).hit is False


def test_a_failed_retrieval_is_no_hit_whatever_its_text_says():
    failed = SearchTurn(
        kind="search", span=(0, 5), query="q", status="error", observation_span=(5, 9), observation="Lima failed"
    )
    correction = SearchTurn(kind="malformed", span=(9, 12), observation_span=(12, 15), observation="Lima?")
    assert rollout_signals(rollout(failed, correction)).hit is False
    later = rollout(failed, block(("Lima", "a city")))
    assert rollout_signals(later).first_hit_turn == 1


def test_turns_are_indexed_among_all_turns():
    malformed = SearchTurn(kind="malformed", span=(0, 4), observation_span=(4, 6), observation="invalid")
    assert rollout_signals(rollout(malformed, block(("Lima", "")))).first_hit_turn == 1


@pytest.mark.parametrize(("gold", "text"), [("no", "the north"), ("19", "in 1914"), ("The", "the the a")])
def test_parts_of_words_are_no_hits(gold, text):
    assert rollout_signals(rollout(block(("x", text)), golds=(gold,))).hit is False


def test_evidence_can_be_found_across_spellings_while_exact_match_stays():
    trace = rollout(block(("Rome", "by Émile Zola\N{EN DASH}1896")), golds=("Emile Zola",), answer="Émile Zola")
    assert rollout_signals(trace) == Signals(False, -1, False, True, False)
    assert rollout_signals(trace, unicode=True) == Signals(True, 0, False, True, False)


@pytest.mark.parametrize(
    ("text", "hit"), [("首都は東京です", True), ("首都は京東です", False), ("首都は\n東\n京", True)]
)
def test_passages_without_spaces(text, hit):
    assert rollout_signals(rollout(block(("日本", text)), golds=("東京",)), unicode=True).hit is hit
    # cut off before the last character of the alias, it is no hit
    whole = block(("日本", text))
    assert rollout_signals(rollout(whole[: whole.index("京")]), unicode=True).hit is False


def test_yes_no_golds_are_marked():
    assert rollout_signals(rollout(golds=("Yes",), answer="yes")).yes_no is True


def test_a_warning_when_nobody_searches():
    silent, searching = rollout(answer="x"), rollout(block(("x", "y")), answer="x")
    broken = rollout(SearchTurn(kind="malformed", span=(0, 4)), stop_reason="no_action")
    message = tool_use_warning([silent, silent, broken])
    assert "3 of 3 rollouts (100%) never searched" in message
    assert "1 hold malformed turns" in message
    assert tool_use_warning([silent, searching]) is None
    assert tool_use_warning([silent, searching], limit=0.5) is not None
    assert tool_use_warning([]) is None


def calls(*found, later=()):
    """One assistant turn of parallel calls, then further turns of one call each: hit | miss | failed | malformed."""
    turns, position = [], 4 * len(found)
    for index, kind in enumerate(found):
        turns.append(_call(kind, (4 * index, 4 * index + 4), position))
        position = (turns[-1].observation_span or (0, position))[1]
    for kind in later:
        turns.append(_call(kind, (position, position + 4), position + 4))
        position = turns[-1].observation_span[1]
    return SearchTrace("q", ("Lima",), tuple(turns), None, None, "max_turns", position)


def _call(kind, span, seen):
    if kind == "malformed":
        return SearchTurn("malformed", span, observation_span=(seen, seen + 2), observation="not a call")
    if kind == "failed":
        return SearchTurn("search", span, query="q", status="error")
    observed = block(("x", "Lima" if kind == "hit" else "Quito"))
    candidates = {"candidate_ids": ("d",), "candidate_scores": (1.0,), "shown": 1}
    return SearchTurn(
        "search", span, query="q", status="ok", **candidates, observation_span=(seen, seen + 2), observation=observed
    )


@pytest.mark.parametrize(
    ("found", "later", "last"),
    [
        (("hit", "miss"), (), 1),
        (("miss", "hit", "failed", "malformed"), ("hit",), 3),
        (("miss", "hit"), ("hit",), 1),
        (("miss", "miss"), ("hit", "hit"), 2),  # the first hit's turn is one call alone
        (("hit",), ("miss",), 0),
    ],
)
def test_the_first_hit_is_of_the_whole_assistant_turn_whose_calls_are_parallel(found, later, last):
    assert rollout_signals(calls(*found, later=later)).first_hit_turn == last


def test_an_answer_right_behind_a_hit_is_no_call_of_its_turn():
    hit = _call("hit", (0, 4), 8)
    trace = SearchTrace("q", ("Lima",), (hit, SearchTurn("answer", (4, 8))), "Lima", (5, 7), "answer", 10)
    assert rollout_signals(trace).first_hit_turn == 0
