"""Which texts share a pass through an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LONGEST_TEXT = 2048  # characters; longer texts are cut by every encoder in use, so they cost no more


def length_groups(texts: Sequence[str], most: int, characters: int | None = None) -> Iterator[list[int]]:
    """Positions of texts to encode together, shortest first: a group is padded to its longest text.

    Args:
        texts: what is to be encoded.
        most: texts in a group.
        characters: bound on a group's longest text times its number of texts; None sets none.
    """
    group: list[int] = []
    shortest = 0
    for position in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        length = min(len(texts[position]), LONGEST_TEXT)
        full = len(group) == most or (characters is not None and length * (len(group) + 1) > characters)
        # one long query among many short ones would cost as much as a whole group of long ones
        if group and (full or length > 4 * shortest + 64):
            yield group
            group = []
        if not group:
            shortest = length
        group.append(position)
    if group:
        yield group
