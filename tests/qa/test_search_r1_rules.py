"""Search-R1's reading of a turn and its observation, written anew from its source, and ours beside it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_bridge.qa.actions import CORRECTIONS, format_observation, parse_action
from verl_bridge.retrieval.corpus import Document


def search_r1_action(text: str) -> tuple[str, str]:
    """(kind, content): the turn is cut at its first </search>, without one at </answer>; its first tag pair counts."""
    for closing in ("</search>", "</answer>"):
        if closing in text:
            text = text[: text.index(closing) + len(closing)]
            break
    found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    return (found[1], found[2].strip()) if found else ("malformed", "")


def search_r1_observation(documents: list[Document]) -> str:
    """Its information block; a document's title is the first line of its contents."""
    lines = "".join(f"Doc {i}(Title: {d.title}) {d.text}\n" for i, d in enumerate(documents, 1))
    return f"\n\n<information>{lines.strip()}</information>\n\n"


def ours(text: str) -> tuple[str, str]:
    action = parse_action(text)
    return action.kind, action.content


WORDS = st.text(alphabet="ab \n.?", max_size=6)
THOUGHT = st.builds("<think>{}</think>".format, WORDS)
FILLED = WORDS.filter(str.strip)
ACTION = st.one_of(st.builds("<search>{}</search>".format, FILLED), st.builds("<answer>{}</answer>".format, FILLED))
TURN = st.lists(st.one_of(WORDS, THOUGHT, ACTION), max_size=6).map("".join)


@given(TURN)
def test_whole_tags_are_read_alike(text):
    """Any mixture of thoughts, text and whole actions, in any number: the first action counts."""
    assert ours(text) == search_r1_action(text)


@pytest.mark.parametrize(
    "text",
    [
        "<search> a </search><answer> b </answer>",
        "<answer> b </answer><search> a </search>",
        "<think> <search> a </search>",
        "<search> a",
        "a </search>",
        "<search> a </answer>",
        "",
        "<answer>\n b c \n</answer> and so on",
    ],
)
def test_these_are_read_alike_too(text):
    assert ours(text) == search_r1_action(text)


@pytest.mark.parametrize(
    ("text", "theirs", "our"),
    [
        ("<search>a<search>b</search>", ("search", "a<search>b"), ("search", "b")),
        ("<search> </search>", ("search", ""), ("malformed", "")),
        ("<search>a<answer>b</answer></search>", ("search", "a<answer>b</answer>"), ("answer", "b")),
        ("<information><answer>b</answer>", ("answer", "b"), ("malformed", "")),
    ],
)
def test_where_ours_is_stricter_the_guide_says_so(text, theirs, our):
    assert search_r1_action(text) == theirs and ours(text) == our


@given(
    st.lists(st.builds(Document, st.just("x"), FILLED.map(str.strip), FILLED.map(str.strip)), min_size=1, max_size=4)
)
def test_the_observation_is_the_same_text(documents):
    assert format_observation(documents) == search_r1_observation(documents)


def test_the_corrections_differ_in_words_alone():
    for text in CORRECTIONS.values():
        assert all(tag in text for tag in ("<search>", "</search>", "<answer>", "</answer>"))
