"""Saved rollouts become traces: which text the model wrote, what it read, and files that cannot be read."""

from __future__ import annotations

import gzip
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_bridge.evaluation.rollouts import SEARCH_R1_CORRECTION, SavedRollout, read_rollouts, trace_from_text
from verl_bridge.qa.actions import CORRECTION, NOTHING_FOUND, RETRIEVAL_FAILED
from verl_bridge.qa.signals import rollout_signals
from verl_bridge.trace import SearchTrace, SearchTurn

SEARCH = "<think> hm </think> <search> capital of Peru </search>"
BLOCK = '\n\n<information>Doc 1(Title: "Peru") Its capital is Lima\nDoc 2(Title: x) y</information>\n\n'
MISS = "\n\n<information>Doc 1(Title: Chile) Santiago</information>\n\n"
ANSWER = "<think>so</think><answer> Lima </answer>"


def read(*parts, stop_reason="stop"):
    return trace_from_text("q", ("Lima",), "".join(parts), stop_reason)


def kinds(trace):
    return [turn.kind for turn in trace.turns]


def test_a_search_and_an_answer_by_hand():
    trace = read(SEARCH, BLOCK, ANSWER)
    search, answer = trace.turns
    text = SEARCH + BLOCK + ANSWER
    assert search.query == "capital of Peru" and search.status == "ok" and search.shown == 1
    assert text[slice(*search.span)] == SEARCH and text[slice(*search.observation_span)] == BLOCK == search.observation
    assert [text[slice(*tag)] for tag in search.tag_spans] == ["<think>", "</think>", "<search>", "</search>"]
    assert text[slice(*answer.span)] == ANSWER and text[slice(*trace.answer_span)] == trace.answer == "Lima"
    assert (trace.stop_reason, trace.response_length) == ("answer", len(text))
    assert rollout_signals(trace).first_hit_turn == 0


def test_what_follows_the_answer_is_no_part_of_it():
    assert read(ANSWER, SEARCH, BLOCK).turns == read(ANSWER).turns


@pytest.mark.parametrize(
    "parts",
    [
        ("<information>Lima</information>", SEARCH, MISS, ANSWER),  # before its search
        (SEARCH, MISS, "<information>Lima</information>", ANSWER),  # after what was really found
        (SEARCH, MISS, "<think>", BLOCK, "</think>", ANSWER),
        (SEARCH, " and ", BLOCK, ANSWER),  # not right behind the search
        (BLOCK, ANSWER),
        ("<answer></answer>", BLOCK, ANSWER),  # nothing is retrieved behind an answer
        (SEARCH, RETRIEVAL_FAILED, BLOCK, ANSWER),
    ],
)
def test_a_block_that_the_model_wrote_is_no_evidence(parts):
    trace = read(*parts)
    assert rollout_signals(trace).hit is False
    assert trace.answer == "Lima"
    assert sum("Lima" in turn.observation for turn in trace.turns) == 0


def test_an_action_inside_a_block_of_the_models_own_is_none():
    # generation stops at the first closing tag, wherever it stands: the turn is malformed, the next one answers
    trace = read("<information><search>Lima</search>", ANSWER)
    assert kinds(trace) == ["malformed", "answer"]
    assert trace.searches == ()


def test_the_query_says_what_is_sought_and_a_block_behind_a_malformed_search_is_no_hit():
    trace = read("<search></search>", BLOCK, ANSWER)
    assert kinds(trace) == ["malformed", "answer"]
    assert trace.turns[0].observation == BLOCK and rollout_signals(trace).hit is False


@pytest.mark.parametrize("notice", [CORRECTION, SEARCH_R1_CORRECTION])
def test_the_loops_corrections_are_not_the_models_words(notice):
    assert "<search>" in notice
    trace = read("I know it.", notice, SEARCH, BLOCK, ANSWER)
    assert kinds(trace) == ["malformed", "search", "answer"]
    assert trace.turns[0].span == (0, len("I know it.")) and trace.turns[0].observation == notice
    assert [turn.query for turn in trace.searches] == ["capital of Peru"]


def test_failed_and_fruitless_searches():
    failed, empty, block = (read(SEARCH, text, ANSWER).turns[0] for text in (RETRIEVAL_FAILED, NOTHING_FOUND, MISS))
    assert [(turn.status, turn.shown) for turn in (failed, empty, block)] == [("error", 0), ("ok", 0), ("ok", 1)]
    blank = read(SEARCH, "\n\n<information> \n</information>\n\n", ANSWER).turns[0]
    assert (blank.status, blank.shown) == ("error", 0)


def test_a_block_cut_by_the_observation_limit_ends_at_the_next_tag():
    cut = BLOCK[: BLOCK.index("Doc 2")]
    trace = read(SEARCH, cut, ANSWER)
    assert trace.turns[0].observation == cut and kinds(trace) == ["search", "answer"]
    assert rollout_signals(trace).hit is True
    assert rollout_signals(read(SEARCH, BLOCK[: BLOCK.index("Lima")], ANSWER)).hit is False
    again = read(SEARCH, MISS[: MISS.index("</")], SEARCH, BLOCK, ANSWER)
    assert kinds(again) == ["search", "search", "answer"] and rollout_signals(again).first_hit_turn == 1
    assert read(SEARCH, cut).turns[0].observation == cut  # nothing followed


def test_the_blank_lines_around_a_block_belong_to_it_and_may_be_missing():
    for block in (BLOCK, BLOCK.strip(), "\n" + BLOCK.strip() + "\n\n"):
        trace = read(SEARCH, block, ANSWER)
        assert trace.turns[0].observation == block and trace.turns[1].span[1] == trace.response_length


@pytest.mark.parametrize(
    ("parts", "given_reason", "reason"),
    [
        ((SEARCH, BLOCK, ANSWER), "length", "answer"),
        ((SEARCH, BLOCK, "<think> hm"), "length", "length"),
        ((SEARCH, BLOCK, SEARCH), "stop", "max_turns"),
        ((SEARCH, BLOCK, "It is Lima."), "stop", "no_action"),
        ((SEARCH, BLOCK), "stop", "no_action"),
        (("",), "stop", "no_action"),
    ],
)
def test_why_it_stopped(parts, given_reason, reason):
    trace = read(*parts, stop_reason=given_reason)
    assert trace.stop_reason == reason
    assert (trace.answer == "Lima") == (reason == "answer")


PIECES = st.sampled_from(
    [SEARCH, BLOCK, MISS, ANSWER, CORRECTION, SEARCH_R1_CORRECTION, RETRIEVAL_FAILED, "x", "\n", " "]
    + [f"<{slash}{name}>" for name in ("think", "search", "answer", "information") for slash in ("", "/")]
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_any_text_gives_a_valid_trace_whose_observations_stand_behind_a_search_or_are_notices(text):
    trace = trace_from_text("q", ("Lima",), text)
    for turn in trace.turns:
        if "<information>" in turn.observation:
            start, end = turn.observation_span
            assert text[:start].endswith("</search>") and text[start:end] == turn.observation
            assert re.search(r"</?(think|search|answer)>", turn.observation) is None
    assert SearchTrace.from_dict(json.loads(json.dumps(trace.to_dict()))) == trace


ROW = {"question": "capital?", "golden_answers": ["Lima"], "response": SEARCH + BLOCK + ANSWER}


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_rows_in_text_form(tmp_path, name):
    full = ROW | {"id": "x7", "em": 1.0, "f1": 1, "pred": "Lima", "stop_reason": "stop", "prompt": "<answer>Lima"}
    first, second = read_rollouts(write(tmp_path / name, full, ROW))
    assert first == SavedRollout("x7", "capital?", first.trace, 1.0, True)
    assert second == SavedRollout("2", "capital?", first.trace, None, None)


def test_rows_of_a_run(tmp_path):
    trace = SearchTrace("q", ("Lima",), (SearchTurn("answer", (0, 3)),), "Lima", (1, 2), "answer", 3)
    row = {"step": 3, "uid": "u1", "reward": 0.8, "type": "A", "trace": trace.to_dict()}
    assert list(read_rollouts(write(tmp_path / "step_000003.jsonl", row))) == [
        SavedRollout("1", "u1", trace, 0.8, None)
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"r.jsonl line 2 is not JSON .* write one object per line"),
        ([1], "line 2 is not an object: write one rollout per line"),
        (ROW | {"response": None}, "line 2 has response None: a rollout in text form needs question, golden_answers"),
        ({"question": "q"}, "line 2 has response None"),
        (ROW | {"question": 3}, "line 2 has question 3"),
        (ROW | {"golden_answers": []}, r"line 2 has gold answers \[\]: give at least one"),
        (ROW | {"em": 0.5}, "line 2 has em 0.5: write 0 or 1"),
        (ROW | {"em": "yes"}, "line 2 has em 'yes': write a number"),
        ({"trace": []}, r"line 2 has trace \[\]: it must be the object a run saves"),
        ({"trace": {"turns": []}}, "line 2: invalid search trace: no 'golden_answers'; drop the line"),
    ],
)
def test_a_bad_row_is_refused_by_its_line(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        list(read_rollouts(write(tmp_path / "r.jsonl", ROW, row)))


def test_files_that_are_not_there_or_empty_or_torn(tmp_path):
    with pytest.raises(ValueError, match=r"no.jsonl does not exist: give a .jsonl"):
        list(read_rollouts(tmp_path / "no.jsonl"))
    with pytest.raises(ValueError, match="is empty: it needs at least one row"):
        list(read_rollouts(write(tmp_path / "empty.jsonl")))
    whole = write(tmp_path / "r.jsonl.gz", *[ROW | {"id": i} for i in range(99)]).read_bytes()
    (tmp_path / "r.jsonl.gz").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match="not a complete gzip file"):
        list(read_rollouts(tmp_path / "r.jsonl.gz"))


def test_rows_come_one_at_a_time(tmp_path):
    rows = read_rollouts(write(tmp_path / "r.jsonl", ROW, ROW | {"response": 1}))
    assert next(rows).trace.answer == "Lima"
    with pytest.raises(ValueError, match="line 2"):
        next(rows)
