"""Normalisation, exact match and alias hits."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_bridge.qa.answers import alias_hit, exact_match, is_yes_no, normalise


def squad(text):
    """SQuAD's published normalisation, written out slowly."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=60))
def test_ascii_normalisation_is_squads(text):
    assert normalise(text) == squad(text)


@given(st.lists(st.sampled_from(["the", "The", "a", "An", "cat", "U.S.", "-", "  ", "O'Neil", "the-end"]), max_size=8))
def test_ascii_words_normalise_as_squads(words):
    assert normalise(" ".join(words)) == squad(" ".join(words))


@given(st.text(st.characters(categories=["L", "Nd", "P", "Zs"]), max_size=60))
def test_normalising_twice_changes_nothing(text):
    once = normalise(text)
    assert normalise(once) == once


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The  Beatles!", "beatles"),
        ("Côte d\N{RIGHT SINGLE QUOTATION MARK}Ivoire", "côte divoire"),
        ("Cote\u0301", "coté"),  # decomposed and composed accents are one
        ("1914\N{EN DASH}1918", "19141918"),
        ("a\u00a0b\u200b", "b"),  # no-break space separates, zero-width space vanishes
        ("e\u200d\u0301", "\u00e9"),
        ("STRASSE", "strasse"),
        ("straße", "strasse"),
        ("", ""),
    ],
)
def test_normalise(text, normalised):
    assert normalise(text) == normalised


@pytest.mark.parametrize(
    ("answer", "golds", "matches"),
    [
        ("the Beatles.", ["Beatles"], True),
        ("Beatle", ["Beatles"], False),
        ("Lima", ["Cusco", "lima"], True),
        ("Lima, Peru", ["Lima"], False),
        ("Lima", "Lima", True),  # one gold as a bare string is not a list of letters
        ("L", "Lima", False),
        (None, ["Beijing"], False),
        ("", ["The"], False),
        ("...", ["!"], False),
        ("A", ["A"], True),
        ("a.", ["A"], True),
        ("The", ["A"], False),
        ("A", ["B"], False),
        ("x", [], False),
    ],
)
def test_exact_match(answer, golds, matches):
    assert exact_match(answer, golds) is matches


@pytest.mark.parametrize(
    ("text", "golds", "hits"),
    [
        ("flowing north to the sea", ["no"], False),
        ("in 1914 the war", ["19"], False),
        ("in 1914, the war", ["1914"], True),
        ("He was born in New York.", ["New York"], True),
        ("a new town near York", ["New York"], False),
        ("New\nYork", ["new york"], True),
        ("Bank of the West", ["Bank of West"], True),  # articles fall out on both sides
        ("the A of The", ["The", "A"], False),
        ("anything", ["..."], False),
        ("", ["Lima"], False),
        ("Lima", [], False),
        ("Lima", "Lima", True),
        ("Doc 1(Title: Lima) the capital", ["Lima"], True),
        ("Sa\N{LATIN SMALL LETTER O WITH TILDE} Tom\u00e9 island", ["s\u00c3o Tom\u00e9", "Sa\u00f5 Tome\u0301"], True),
    ],
)
def test_alias_hit(text, golds, hits):
    assert alias_hit(text, golds) is hits


words = st.lists(st.sampled_from(["lima", "peru", "north", "no", "19", "1914"]), min_size=0, max_size=8)


@given(words, words)
def test_alias_hit_is_a_contiguous_run_of_tokens(text, alias):
    found = bool(alias) and any(text[i : i + len(alias)] == alias for i in range(len(text)))
    assert alias_hit(" ".join(text), [" ".join(alias)]) is found


@pytest.mark.parametrize(
    ("golds", "verdict"),
    [(["Yes"], True), ("no.", True), (["north"], False), (["Lima", "No"], True), ([], False), (["yes we can"], False)],
)
def test_yes_no(golds, verdict):
    assert is_yes_no(golds) is verdict
