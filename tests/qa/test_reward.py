"""The reward comes from the trace: right numbers, never from the text, always the same keys."""

import json

import pytest

from verl_bridge.qa.reward import RewardResult, compute_score, score_trace
from verl_bridge.trace import SearchTrace, SearchTurn


def trace(answer="Lima", golds=("Lima",), malformed=False, searches=1, seen="the capital is Lima"):
    turns, position = [], 0
    if malformed:
        turns.append(SearchTurn(kind="malformed", span=(0, 4)))
        position = 4
    for _ in range(searches):
        turns.append(
            SearchTurn(
                kind="search",
                span=(position, position + 5),
                query="q",
                status="ok",
                candidate_ids=("d",),
                candidate_scores=(0.5,),
                shown=1,
                observation_span=(position + 5, position + 9),
                observation=seen,
            )
        )
        position += 9
    if answer is not None:
        turns.append(SearchTurn(kind="answer", span=(position, position + 3)))
        position += 3
    return SearchTrace(
        question="capital of Peru?",
        golden_answers=golds,
        turns=tuple(turns),
        answer=answer,
        answer_span=None if answer is None else (position - 2, position - 1),
        stop_reason="max_turns" if answer is None else "answer",
        response_length=position,
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (trace(), RewardResult(1.0, True, True, True, 1)),
        (trace(malformed=True), RewardResult(0.8, True, False, True, 1)),
        (trace(answer="Cusco"), RewardResult(0.0, False, True, True, 1)),
        (trace(answer="Cusco", malformed=True), RewardResult(0.0, False, False, True, 1)),
        (trace(answer=None, searches=2), RewardResult(0.0, False, False, True, 2)),
        (trace(searches=0), RewardResult(1.0, True, True, False, 0)),
    ],
)
def test_scores_by_default(record, expected):
    assert score_trace(record) == expected


def test_a_hit_is_never_part_of_the_score():
    with_hit, without = score_trace(trace(answer="Cusco")), score_trace(trace(answer="Cusco", seen="nothing"))
    assert (with_hit.tool_hit, without.tool_hit) == (True, False)
    assert with_hit.score == without.score == 0.0


def test_format_settings():
    assert score_trace(trace(malformed=True), format_weight=0.5).score == 0.5
    assert score_trace(trace(malformed=True), format_weight=0.0).score == 1.0
    assert score_trace(trace(answer="Cusco"), wrong_format_bonus=0.1).score == 0.1
    assert score_trace(trace(answer=None), wrong_format_bonus=0.1).score == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format_weight": 1.0}, r"format_weight=1.0 must lie in \[0, 1\)"),
        ({"format_weight": -0.1}, "format_weight=-0.1"),
        ({"wrong_format_bonus": 0.8}, r"wrong_format_bonus=0.8 must lie in .*\[0, 0.8\)"),
        ({"wrong_format_bonus": -1.0}, "wrong_format_bonus=-1.0"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        score_trace(trace(), **settings)


def test_a_row_without_gold_answers_is_an_error():
    with pytest.raises(ValueError, match="no golden answers for question 'capital of Peru\\?'"):
        score_trace(trace(golds=()))


PROMPT = "Answer in tags, for example <answer> Beijing </answer>. Question: capital of China?"


@pytest.mark.parametrize("text", [PROMPT, "", "<answer> Beijing </answer>", PROMPT + "<answer> Lima </answer>"])
def test_the_text_never_changes_the_score(text):
    unanswered = {"search_trace": trace(answer=None, golds=("Beijing",)).to_dict()}
    assert compute_score("nq", text, {"target": ["Beijing"]}, unanswered)["score"] == 0.0
    answered = {"search_trace": trace(answer="Beijing", golds=("Beijing",)).to_dict()}
    assert compute_score("nq", text, {"target": ["Lima"]}, answered)["score"] == 1.0


@pytest.mark.parametrize(
    "record", [trace(), trace(answer=None), trace(malformed=True), trace(searches=0), trace(answer="", seen="")]
)
def test_every_row_has_the_same_numeric_keys(record):
    row = compute_score("nq", "", None, {"search_trace": json.loads(json.dumps(record.to_dict())), "index": 3})
    assert list(row) == ["score", "em", "format", "tool_hit", "supcor", "searches"]
    assert all(type(value) is float for value in row.values())


def test_settings_and_foreign_arguments_of_the_host():
    extra = {"search_trace": trace(malformed=True)}
    row = compute_score("nq", "", None, extra, format_weight=0.5, reward_router_address=None)
    assert row == {"score": 0.5, "em": 1.0, "format": 0.0, "tool_hit": 1.0, "supcor": 1.0, "searches": 1.0}


@pytest.mark.parametrize("extra", [None, {}, {"search_trace": None}, {"index": 1}])
def test_a_missing_trace_fails_loudly_and_names_the_fix(extra):
    with pytest.raises(KeyError, match=r"search_trace.*'nq'.*default_agent_loop"):
        compute_score("nq", "<answer>Lima</answer>", {"target": ["Lima"]}, extra)


def test_an_invalid_trace_is_not_scored():
    with pytest.raises(ValueError, match="invalid search trace"):
        compute_score("nq", "", None, {"search_trace": trace().to_dict() | {"stop_reason": "tired"}})


def test_an_unknown_setting_is_refused_naming_the_closest():
    extra = {"search_trace": trace()}
    with pytest.raises(ValueError, match=r"no setting format_wieght=0\.5: did you mean 'format_weight'"):
        compute_score("nq", "", None, extra, format_wieght=0.5)
    with pytest.raises(ValueError, match="no setting colour='red': it takes format_weight and wrong_format_bonus"):
        compute_score("nq", "", None, extra, colour="red")
    assert compute_score("nq", "", None, extra, reward_model_tokenizer=None)["score"] == 1.0


def test_a_blank_gold_answer_is_an_error():
    with pytest.raises(ValueError, match=r"a blank one \(\('Lima', ' '\)\)"):
        score_trace(trace(golds=("Lima", " ")))
