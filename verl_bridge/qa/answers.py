"""Matching text with gold answers: one normalisation for exact match and for alias hits."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache

_ARTICLES = frozenset({"a", "an", "the"})
_VERDICTS = frozenset({"yes", "no"})


class _Stripped(dict):
    """Translation table that drops punctuation, symbols and invisible format characters of all of Unicode."""

    def __missing__(self, codepoint: int) -> int | None:
        category = unicodedata.category(chr(codepoint))
        kept = None if category[0] in "PS" or category == "Cf" else codepoint
        self[codepoint] = kept
        return kept


_STRIPPED = _Stripped()


def _tokens(text: str) -> list[str]:
    if text.isascii():
        return text.lower().translate(_STRIPPED).split()
    # composed before stripping, so that "=" + slash goes as one symbol, and after, when a joiner stood between
    stripped = unicodedata.normalize("NFC", text.casefold()).translate(_STRIPPED)
    return unicodedata.normalize("NFC", stripped).split()


def normalise(text: str) -> str:
    """Lower-case, drop punctuation and articles, join the words with single spaces.

    SQuAD's normalisation as Search-R1 uses it; on ASCII text the two agree. Beyond ASCII, typographic punctuation is
    dropped as well and composed and decomposed accents are equal [ours].
    """
    return " ".join(token for token in _tokens(text) if token not in _ARTICLES)


@lru_cache(maxsize=65536)
def _normalised_gold(gold: str) -> str:
    return normalise(gold)


def _aliases(golds: str | Iterable[str]) -> tuple[str, ...]:
    return (golds,) if isinstance(golds, str) else tuple(golds)


def exact_match(answer: str | None, golds: str | Iterable[str]) -> bool:
    """Whether the answer equals one gold alias after normalisation; None or an empty answer never does.

    A gold made of articles alone ("A", "The The") normalises to nothing; there the articles are kept, so that
    the choice letter "A" is matched by "A" and by nothing else [ours].
    """
    if answer is None:
        return False
    normalised = normalise(answer)
    if normalised:
        return any(normalised == _normalised_gold(gold) for gold in _aliases(golds))
    words = _tokens(answer)
    return bool(words) and any(words == _tokens(gold) for gold in _aliases(golds))


def alias_hit(text: str, golds: str | Iterable[str]) -> bool:
    """Whether the text holds one gold alias as a run of whole normalised tokens.

    "no" is not in "north", "19" is not in "1914". An alias that normalises to nothing matches nothing [ours].
    """
    aliases = [alias for alias in map(_normalised_gold, _aliases(golds)) if alias]
    if not aliases:
        return False
    padded = f" {normalise(text)} "
    return any(f" {alias} " in padded for alias in aliases)


def is_yes_no(golds: str | Iterable[str]) -> bool:
    """Whether one alias is a bare yes or no: a verdict is inferred, not copied, so alias hits say nothing [paper]."""
    return any(_normalised_gold(gold) in _VERDICTS for gold in _aliases(golds))
