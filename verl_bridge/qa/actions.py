"""The tag grammar of a search agent's turn (Search-R1's tags), and where its parts lie among the sampled tokens.

One rule: the first complete action wins, later ones are ignored and cut. An action is ``<search>`` or ``<answer>``,
text without any structural tag, and its own closing tag. It follows that

* an action inside ``<think>`` counts as any other;
* of nested or repeated openings the innermost counts: ``<search>a<search>b</search>`` asks for ``b``, and
  ``<search>a<answer>b</answer></search>`` answers ``b`` (what a generation stopped at the first closing tag gives);
* mismatched tags (``<search>a</answer>``), and no action at all, make the whole turn malformed;
* an empty first action makes the turn malformed, whatever follows;
* inside an ``<information>`` block that the model wrote itself, closed or not, nothing counts.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from verl_bridge.retrieval.corpus import Document

Span = tuple[int, int]

#: What the model reads after a turn without a valid action. Not sampled, so it is never trained on.
CORRECTION = (
    "\n\nThat was not a valid action. To look something up, write one query between <search> and </search>. "
    "To finish, write the final answer between <answer> and </answer>.\n\n"
)
#: The same in the words of Search-R1 (github.com/PeterGriffinJin/Search-R1, Apache-2.0), for policies trained on them.
SEARCH_R1_CORRECTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
#: By the name that ``verl_bridge.agent.correction`` takes.
CORRECTIONS = {"verl_bridge": CORRECTION, "search_r1": SEARCH_R1_CORRECTION}
#: What the model reads when the retriever failed: no information block, so nothing looks like evidence.
RETRIEVAL_FAILED = "\n\nThe search failed and brought no documents. Try again or answer from what is known.\n\n"
#: What the model reads when the retriever answered and had nothing.
NOTHING_FOUND = "\n\nThe search found no documents. Try other words or answer from what is known.\n\n"
#: Around the documents of an observation.
OBSERVATION_HEAD, OBSERVATION_TAIL = "\n\n<information>", "</information>\n\n"

_TAG = re.compile(r"<(/?)(think|search|answer|information)>")
_CALL_TAG = re.compile(r"</?tool_call>")  # no action of this grammar, but a structural literal all the same
_DOCUMENT_HEAD = re.compile(r"^Doc \d+\(Title: ", re.MULTILINE)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 8  # tokens; a character has at most four bytes, so a window of undecodable tokens can be split by then


@dataclass(frozen=True)
class Action:
    """What one assistant turn asked for. All positions are character offsets in the parsed text.

    Args:
        kind: ``search``, ``answer`` or ``malformed``.
        content: the query or the answer without surrounding whitespace, empty when malformed.
        start: where the action's opening tag begins (malformed without an action: 0).
        end: just past the action's closing tag; what follows is cut (malformed without an action: the text's end).
        content_start: where ``content`` begins.
        content_end: where ``content`` ends.
        tags: the structural tags before ``end``, in order.
    """

    kind: Literal["search", "answer", "malformed"]
    content: str
    start: int
    end: int
    content_start: int
    content_end: int
    tags: tuple[Span, ...]


def parse_action(text: str) -> Action:
    """The first complete action of a turn, by the rule at the top of this module."""
    tags: list[Span] = []
    opening: re.Match[str] | None = None  # the tag just before, when it opens an action
    fabricated = False
    for tag in _TAG.finditer(text):
        closing, name = tag[1] == "/", tag[2]
        tags.append(tag.span())
        if name == "information":
            fabricated = not closing
        elif closing and not fabricated and opening is not None and opening[2] == name:
            raw = text[opening.end() : tag.start()]
            content = raw.strip()
            content_start = opening.end() + len(raw) - len(raw.lstrip()) if content else opening.end()
            kind = name if content else "malformed"
            content_end = content_start + len(content)
            return Action(kind, content, opening.start(), tag.end(), content_start, content_end, tuple(tags))
        opening = tag if not closing and name in ("search", "answer") else None
    return Action("malformed", "", 0, len(text), 0, 0, tuple(tags))


def format_observation(documents: Sequence[Document]) -> str:
    """The information block for retrieved documents, in Search-R1's form. Raises ValueError when there are none.

    Structural tags inside a document lose their angle brackets: a corpus cannot close the block or act for the model.
    """
    if not documents:
        raise ValueError("no documents to show: an empty information block is not an observation, use RETRIEVAL_FAILED")
    lines = (
        f"Doc {i}(Title: {_without_tags(document.title)}) {_without_tags(document.text)}"
        for i, document in enumerate(documents, start=1)
    )
    return OBSERVATION_HEAD + "\n".join(lines) + OBSERVATION_TAIL


def observed_text(observation: str) -> str:
    """The documents' own words in an observation: tags and "Doc 1(Title: " are not evidence and join no words."""
    return _DOCUMENT_HEAD.sub(" ", _TAG.sub("\n", observation))


def _without_tags(text: str) -> str:
    return _TAG.sub(r"[\1\2]", text)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of the ids with nothing skipped or tidied: the text that :func:`token_offsets` refers to."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def token_offsets(tokenizer: Any, ids: Sequence[int]) -> list[Span]:
    """The character span of every token in ``decode(tokenizer, ids)``; the spans join up to the whole text.

    A character whose bytes are spread over tokens belongs to the last of them; the others are empty at its start.
    Ids are never re-encoded. Cost: linear for byte-level tokenizers, quadratic at worst (others, rarely).
    """
    ids = list(ids)
    text = decode(tokenizer, ids)
    ends = _windowed_ends(tokenizer, ids, text)
    if ends is None:
        ends, reached = [], 0
        for i in range(len(ids)):
            reached = max(reached, _common_prefix(decode(tokenizer, ids[: i + 1]), text, 0))
            ends.append(reached)
    return list(zip([0, *ends][: len(ends)], ends, strict=True))


def _common_prefix(piece: str, text: str, position: int) -> int:
    if text.startswith(piece, position):
        return len(piece)
    return next(i for i, character in enumerate(piece) if not text.startswith(character, position + i))


def _windowed_ends(tokenizer: Any, ids: list[int], text: str) -> list[int] | None:
    """Token ends from decoding short windows; None when the tokenizer's pieces do not simply join up."""
    ends: list[int] = []
    singles = {i: decode(tokenizer, [i]) for i in set(ids)}
    position = first = 0  # characters and tokens that are settled
    while first < len(ids):
        piece, last = singles[ids[first]], first + 1
        ends.append(position + _common_prefix(piece, text, position))
        # a window grows while its bytes may still be part of a character that later tokens complete
        while piece.endswith(_REPLACEMENT) and last < len(ids):
            if last - first >= _WINDOW:
                split = next((s for s in range(last - 1, first, -1) if _splits(tokenizer, ids, first, s, last)), None)
                if split is not None:
                    position += len(decode(tokenizer, ids[first:split]))
                    first = split
            last += 1
            piece = decode(tokenizer, ids[first:last])
            ends.append(max(ends[-1], position + _common_prefix(piece, text, position)))
        if not text.startswith(piece, position):
            return None
        position, first = position + len(piece), last
    return ends if position == len(text) else None


def _splits(tokenizer: Any, ids: list[int], first: int, split: int, last: int) -> bool:
    left, right = decode(tokenizer, ids[first:split]), decode(tokenizer, ids[split:last])
    return left + right == decode(tokenizer, ids[first:last])


def char_spans_to_token_spans(offsets: Sequence[Span], spans: Iterable[Span]) -> list[Span]:
    """The tokens that hold any character of each character span, as half-open token spans.

    A token that straddles a span's edge belongs to it: ``</search> So`` in one token is part of the action.

    Args:
        offsets: character span per token, as :func:`token_offsets` gives them.
        spans: half-open character spans, in any order.
    """
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    result = []
    for start, end in spans:
        first = bisect_right(ends, start)
        while first > 0 and offsets[first - 1] == (start, start):
            first -= 1  # leading bytes of the character at `start`
        result.append((first, max(first, bisect_left(starts, end))))
    return result


@dataclass(frozen=True)
class TurnTokens:
    """An action and where it lies among the sampled ids of its turn (token positions within the turn).

    Args:
        action: the parsed action.
        length: how many of the ids belong to the turn; the rest is cut.
        tag_spans: tokens of structural tags and of the tokenizer's control tokens.
        content_span: tokens of the query or answer.
    """

    action: Action
    length: int
    tag_spans: tuple[Span, ...]
    content_span: Span


def read_turn(tokenizer: Any, ids: Sequence[int]) -> TurnTokens:
    """Parse the sampled ids of one assistant turn without re-encoding anything."""
    ids = list(ids)
    offsets = token_offsets(tokenizer, ids)
    action = parse_action(decode(tokenizer, ids))
    content = (action.content_start, action.content_end)
    calls = [tag.span() for tag in _CALL_TAG.finditer(decode(tokenizer, ids), 0, action.end)]
    spans = [(0, action.end), content, *action.tags, *calls]
    kept, content_span, *tag_spans = char_spans_to_token_spans(offsets, spans)
    special = set(tokenizer.all_special_ids)
    control = [(i, i + 1) for i, token in enumerate(ids[: kept[1]]) if token in special]
    return TurnTokens(action, kept[1], tuple(sorted({*tag_spans, *control})), content_span)
