"""Matching text with gold answers: exact match as Search-R1 scores it, and aliases in what was retrieved.

Two normalisations. The plain one is Search-R1's to the letter, so that scores compare with published ones. The
Unicode-aware one [ours] is for finding evidence in real corpora, where one name is spelt in several ways:

* width, ligatures and composed forms are unified (NFKC), case is folded;
* accents on Latin letters are dropped, and letters like ø, ł and the Turkish ı become o, l, i: "Émile" is "Emile";
  marks of other scripts are letters in their own right and stay;
* dashes and typographic punctuation separate words, so "1914–1918" holds 1914 and "Mason–Dixon" is "Mason Dixon";
  other ASCII punctuation, typographic quotes and invisible characters vanish, as in the plain one;
* scripts written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) are matched character by character. A
  word inside a longer one cannot be told apart there ("京都" is in "東京都"), but an alias of one character has to
  stand alone. Korean words are taken as they are spaced.

On ASCII text without hyphens the two agree.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

_ARTICLES = frozenset({"a", "an", "the"})
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_VERDICTS = frozenset({"yes", "no"})
_LATIN_ACCENTS = re.compile("(?<=[a-z])[\u0300-\u036f]+")
_LATIN_LETTERS = {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "ħ": "h", "ı": "i", "ŧ": "t", "þ": "th", "æ": "ae", "œ": "oe"}
_UNSPACED = re.compile(
    "["
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f"  # Burmese
    "\u1780-\u17ff"  # Khmer
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"  # Japanese syllables
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
    "]"
    # with the marks that belong to a character
    "[\u0300-\u036f\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u17b4-\u17d3\u3099\u309a]*"
)


class _Plain(dict):
    """Translation table, filled as characters come up: `str.translate` is slow on those that a table lacks."""

    def __missing__(self, codepoint: int) -> int:
        self[codepoint] = codepoint
        return codepoint


class _Unicode(dict):
    """The Unicode-aware table, filled likewise: None drops a character, a space separates words."""

    def __missing__(self, codepoint: int) -> int | str | None:
        character = chr(codepoint)
        category = unicodedata.category(character)
        if character in _LATIN_LETTERS:
            target: int | str | None = _LATIN_LETTERS[character]
        elif category == "Pd" or character == "\N{MINUS SIGN}":
            target = " "
        elif category in ("Cf", "Pi", "Pf") or character in string.punctuation:
            target = None
        elif category[0] in "PS":
            target = " "
        else:
            target = codepoint
        self[codepoint] = target
        return target


_PLAIN = _Plain.fromkeys(map(ord, string.punctuation))
_UNICODE = _Unicode(
    {ord("\N{PRIME}"): None, ord("\N{FRACTION SLASH}"): None, ord("\N{MODIFIER LETTER APOSTROPHE}"): None}
)


def normalise(text: str, *, unicode: bool = False) -> str:
    """Lower-case, drop punctuation and articles, join the words with single spaces.

    Search-R1's (SQuAD's) normalisation; with ``unicode`` the one at the top of this module.
    """
    if not unicode:
        text = text.lower().translate(_PLAIN)
    elif text.isascii():
        text = text.lower().translate(_UNICODE)
    else:
        text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text).casefold())
        text = _LATIN_ACCENTS.sub("", text.translate(_UNICODE))
        text = _UNSPACED.sub(r" \g<0> ", unicodedata.normalize("NFC", text))
    words = [word for word in text.split() if word not in _ARTICLES]
    # an article may also end where a character that is neither letter nor digit was left: "the–end"
    return " ".join([word if word.isalnum() else " ".join(_ARTICLE.sub(" ", word).split()) for word in words])


@lru_cache(maxsize=65536)
def _normalised_gold(gold: str, unicode: bool) -> str:
    return normalise(gold, unicode=unicode)


@lru_cache(maxsize=4096)  # about 20 MB of passages: a group of rollouts reads the same ones again and again
def _normalised_text(text: str, unicode: bool) -> str:
    return f" {normalise(text, unicode=unicode)} "


def _aliases(golds: str | Iterable[str]) -> tuple[str, ...]:
    return (golds,) if isinstance(golds, str) else tuple(golds)


def exact_match(answer: str | None, golds: str | Iterable[str], *, unicode: bool = False) -> bool:
    """Whether the answer equals one gold alias after normalisation; None or an empty answer never does.

    A gold made only of articles ("A", "The The") normalises to nothing; there the articles are kept, so that
    the choice letter "A" is matched by "A" and by nothing else [ours].
    """
    if answer is None:
        return False
    normalised = normalise(answer, unicode=unicode)
    if normalised:
        return any(normalised == _normalised_gold(gold, unicode) for gold in _aliases(golds))
    words = _with_articles(answer)
    return bool(words) and any(words == _with_articles(gold) for gold in _aliases(golds))


def _with_articles(text: str) -> list[str]:
    return text.lower().translate(_PLAIN).split()


def alias_hit(text: str, golds: str | Iterable[str], *, unicode: bool = False) -> bool:
    """Whether the text holds one gold alias as a run of whole normalised tokens.

    "no" is not in "north", "19" is not in "1914". An alias that normalises to nothing matches nothing [ours].
    """
    aliases = [alias for gold in _aliases(golds) if (alias := _normalised_gold(gold, unicode))]
    if not aliases:
        return False
    padded = _normalised_text(text, unicode)
    return any(f" {alias} " in padded and not (unicode and _inside(alias, padded)) for alias in aliases)


def _inside(alias: str, padded: str) -> bool:
    """Whether an alias of one character of an unspaced script only ever stands next to others of its kind."""
    if not _UNSPACED.fullmatch(alias):
        return False
    words = padded.split()
    alone = (
        word == alias and not _UNSPACED.fullmatch(before) and not _UNSPACED.fullmatch(after)
        for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False)
    )
    return not any(alone)


def is_yes_no(golds: str | Iterable[str]) -> bool:
    """Whether one alias is a bare yes or no: a verdict is inferred, not copied, so alias hits say nothing [paper]."""
    return any(_normalised_gold(gold, False) in _VERDICTS for gold in _aliases(golds))
