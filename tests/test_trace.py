"""The shared record: what it accepts, what it refuses, and that JSON keeps it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_bridge.trace import SearchTrace, SearchTurn

SEARCH = SearchTurn(
    kind="search",
    span=(0, 6),
    tag_spans=((0, 1), (5, 6)),
    query="capital of Peru",
    status="ok",
    candidate_ids=("d7", "d2", "d9"),
    candidate_scores=(0.9, 0.5, 0.25),
    shown=2,
    observation_span=(6, 20),
    observation="<information>Doc 1(Title: Lima) Lima</information>",
    adapter_version=3,
)
ANSWER = SearchTurn(kind="answer", span=(20, 25), tag_spans=((20, 21), (24, 25)))
TRACE = SearchTrace(
    question="What is the capital of Peru?",
    golden_answers=("Lima", "Ciudad de los Reyes"),
    turns=(SEARCH, ANSWER),
    answer="Lima",
    answer_span=(21, 24),
    stop_reason="answer",
    response_length=25,
)


def test_json_round_trip_restores_an_equal_record():
    assert SearchTrace.from_dict(json.loads(json.dumps(TRACE.to_dict()))) == TRACE


def test_json_round_trip_of_a_rollout_without_turns_or_answer():
    trace = SearchTrace("q", ("x",), (), None, None, "length", 0)
    assert SearchTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


def test_half_a_surrogate_pair_in_a_query_is_a_question_mark():
    """A call's JSON may spell one, which no tokenizer reads and no file takes; a whole pair is a character."""
    turn = replace(SEARCH, query=json.loads('"coin \\ud83d \\ud83e\\ude99"'))
    assert turn.query == "coin ? \N{COIN}" and turn.query.encode()
    record = json.loads(json.dumps(replace(TRACE, turns=(SEARCH, ANSWER)).to_dict()))
    record["turns"][0]["query"] = "\ude99"
    assert SearchTrace.from_dict(record).searches[0].query == "?"


def test_searches_are_the_well_formed_search_turns_in_order():
    malformed = SearchTurn(kind="malformed", span=(6, 8))
    second = replace(SEARCH, span=(8, 10), tag_spans=(), observation_span=(10, 12), query="Lima")
    trace = replace(
        TRACE,
        turns=(replace(SEARCH, observation_span=None, observation=""), malformed, second),
        answer=None,
        answer_span=None,
        stop_reason="max_turns",
    )
    assert [turn.query for turn in trace.searches] == ["capital of Peru", "Lima"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "tool"}, "kind 'tool' is not one of"),
        ({"status": "timeout"}, "status 'timeout' is not one of"),
        ({"span": (6, 0), "tag_spans": ()}, "is not ordered"),
        ({"span": (-1, 6)}, "is not ordered"),
        ({"tag_spans": ((5, 7),)}, "lies outside its turn"),
        ({"tag_spans": ((3, 2),)}, "lies outside its turn"),
        ({"query": None}, "a search turn with query None"),
        ({"kind": "answer"}, "a answer turn with query 'capital of Peru'"),
        ({"kind": "answer", "query": None}, "a answer turn with retrieval 'ok'"),
        ({"candidate_scores": (0.9,)}, "3 candidates with 1 scores"),
        ({"status": "error"}, "candidates on a retrieval with status 'error'"),
        ({"shown": 4}, "4 shown of 3 candidates"),
        ({"shown": -1}, "-1 shown of 3 candidates"),
        ({"observation_span": (5, 20)}, "starts before its turn"),
        ({"observation_span": (9, 8)}, "starts before its turn"),
        ({"observation_span": None}, "observation text without a span"),
    ],
)
def test_invalid_turns_are_refused(changes, message):
    with pytest.raises(ValueError, match="invalid search trace") as error:
        replace(SEARCH, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_reason": "tired"}, "stop_reason 'tired' is not one of"),
        ({"stop_reason": "length"}, "answer with stop_reason 'length'"),
        ({"answer": None, "answer_span": None}, "answer with stop_reason 'answer'"),
        ({"answer_span": None}, "answer and answer_span go together"),
        ({"turns": (SEARCH, replace(ANSWER, span=(19, 25)))}, "overlaps what came before position 20"),
        ({"response_length": 24}, "turns reach token 25 of 24"),
        ({"turns": (SEARCH,)}, "an answer needs a last turn of kind 'answer'"),
        ({"turns": ()}, "an answer needs a last turn of kind 'answer'"),
        ({"answer_span": (19, 24)}, "lies outside the answer turn"),
        ({"answer_span": (21, 26)}, "lies outside the answer turn"),
        (
            {"turns": (ANSWER, replace(ANSWER, span=(25, 30), tag_spans=())), "answer_span": (26, 27)},
            "turns reach token 30 of 25",
        ),
        (
            {
                "turns": (replace(ANSWER, span=(0, 5), tag_spans=()), replace(ANSWER, span=(20, 25))),
            },
            "an answer turn before the end",
        ),
    ],
)
def test_invalid_rollouts_are_refused(changes, message):
    with pytest.raises(ValueError, match="invalid search trace") as error:
        replace(TRACE, **changes)
    assert message in str(error.value)


def test_records_read_from_json_are_validated_too():
    record = TRACE.to_dict() | {"response_length": 3}
    with pytest.raises(ValueError, match="turns reach token 25 of 3"):
        SearchTrace.from_dict(record)


def parallel(*spans):
    """A trace of searches with (span, observation span) each."""
    turns = tuple(replace(SEARCH, span=span, tag_spans=(), observation_span=seen) for span, seen in spans)
    return SearchTrace("q", ("x",), turns, None, None, "max_turns", 16)


def test_parallel_calls_of_one_turn_are_searches_with_their_observations_behind_them():
    trace = parallel(((0, 4), (8, 10)), ((4, 8), (10, 12)))
    assert [turn.observation_span for turn in trace.searches] == [(8, 10), (10, 12)]
    assert SearchTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([((0, 4), (8, 10)), ((3, 8), (10, 12))], "span (3, 8) overlaps what came before position 4"),
        ([((0, 4), (8, 10)), ((4, 9), (10, 12))], "span (8, 10) overlaps what came before position 9"),
        ([((0, 4), (8, 11)), ((4, 8), (10, 12))], "span (10, 12) overlaps what came before position 11"),
        ([((0, 4), (10, 12)), ((4, 8), (8, 10))], "span (8, 10) overlaps what came before position 12"),
        ([((4, 8), (8, 10)), ((0, 4), (10, 12))], "span (0, 4) overlaps what came before position 8"),
        ([((0, 4), (8, 10)), ((8, 10), (10, 12))], "span (8, 10) overlaps what came before position 10"),
        ([((0, 4), (8, 10)), ((4, 8), (10, 17))], "turns reach token 17 of 16"),
    ],
)
def test_parallel_calls_that_overlap_or_are_out_of_order_are_refused(spans, message):
    with pytest.raises(ValueError, match="invalid search trace") as error:
        parallel(*spans)
    assert message in str(error.value)


@st.composite
def traces(draw):
    position, turns = 0, []
    for _ in range(draw(st.integers(0, 4))):
        start = position + draw(st.integers(0, 2))
        end = start + draw(st.integers(0, 9))
        kind = draw(st.sampled_from(["search", "malformed"]))
        status = draw(st.sampled_from(["ok", "error", "none"])) if kind == "search" else "none"
        count = draw(st.integers(0, 3)) if status == "ok" else 0
        seen = draw(st.booleans())
        span = (end, end + draw(st.integers(0, 9))) if seen else None
        turns.append(
            SearchTurn(
                kind=kind,
                span=(start, end),
                tag_spans=((start, end),) if draw(st.booleans()) else (),
                query=draw(st.text()) if kind == "search" else None,
                status=status,
                candidate_ids=tuple(map(str, range(count))),
                candidate_scores=tuple(draw(st.floats(-1, 1)) for _ in range(count)),
                shown=draw(st.integers(0, count)),
                observation_span=span,
                observation=draw(st.text()) if seen else "",
                adapter_version=draw(st.none() | st.integers(0, 9)),
            )
        )
        position = (span or turns[-1].span)[1]
    answered = draw(st.booleans())
    if answered:
        turns.append(SearchTurn(kind="answer", span=(position, position + 4)))
        position += 4
    return SearchTrace(
        question=draw(st.text()),
        golden_answers=tuple(draw(st.lists(st.text(), max_size=3))),
        turns=tuple(turns),
        answer=draw(st.text()) if answered else None,
        answer_span=(position - 3, position - 1) if answered else None,
        stop_reason="answer" if answered else draw(st.sampled_from(["max_turns", "length", "no_action", "error"])),
        response_length=position + draw(st.integers(0, 5)),
    )


@given(traces())
def test_any_valid_record_survives_json(trace):
    assert SearchTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"golden_answers": "Lima"}, "golden_answers 'Lima' is not a list of strings"),
        ({"golden_answers": ["Lima", 3]}, "is not a list of strings"),
        ({"golden_answers": None}, "golden_answers None is not"),
        ({"answer_span": [21]}, "not enough values"),
        ({"answer_span": [21, 22, 24]}, "too many values"),
        ({"answer_span": [21.0, 24]}, "is not two integers"),
        ({"answer_span": [True, 24]}, "is not two integers"),
        ({"answer_span": 21}, "cannot unpack"),
        ({"turns": None}, "not iterable"),
        ({"turns": [{}]}, "no 'span'"),
        ({"turns": ["search"]}, "not a mapping"),
        ({"response_length": "25"}, "not supported"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_records_of_another_shape_are_invalid_traces(changes, message):
    with pytest.raises(ValueError, match="invalid search trace: ") as error:
        SearchTrace.from_dict(json.loads(json.dumps(TRACE.to_dict())) | changes)
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["question", "golden_answers", "turns", "answer_span"])
def test_a_record_without_a_field_is_an_invalid_trace(key):
    record = TRACE.to_dict()
    del record[key]
    with pytest.raises(ValueError, match=f"invalid search trace: .*'{key}'"):
        SearchTrace.from_dict(record)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate_scores": [0.9, float("nan"), 0.1]}, "candidate score nan is not a finite number"),
        ({"candidate_scores": [0.9, "0.5", 0.1]}, "candidate score '0.5'"),
        ({"candidate_ids": "abc"}, "candidate_ids 'abc' is not a list of strings"),
        ({"tag_spans": [[0]]}, "not enough values"),
    ],
)
def test_turns_of_another_shape_are_invalid_traces(changes, message):
    record = TRACE.to_dict()
    record["turns"] = [{**record["turns"][0], **changes}, *record["turns"][1:]]
    with pytest.raises(ValueError, match="invalid search trace: ") as error:
        SearchTrace.from_dict(record)
    assert message in str(error.value)
