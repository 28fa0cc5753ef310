"""A token budget for an update: a sample of its turns that favours none, whatever their lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence

COUNTING_ORDERS = 8


def sample_turns(needs: Sequence[Sequence[int]], tokens: Sequence[int], budget: int, seed: int) -> list[int]:
    """Turns whose sequences fit into ``budget`` tokens, each counted once however many turns share it.

    Filling the budget greedily would favour short turns. So the sample size is fixed first: the smallest number of
    turns that fits in each of COUNTING_ORDERS random orders; a fresh order then picks the turns [ours]. Given the size,
    every set of that size is equally likely.

    At most one draw in nine exceeds the budget, except where a single turn alone is larger: slightly when lengths are
    similar, by the whole length of those drawn when a few turns are much longer than the rest.

    Args:
        needs: per turn the sequences it needs, without repetition.
        tokens: tokens of each sequence.
        budget: at least 1.
        seed: of the orders.

    Returns:
        The turns drawn, ascending; all when all fit, and at least one when there are any.
    """
    generator = random.Random(seed)
    order = list(range(len(needs)))
    count = len(needs)
    for _ in range(COUNTING_ORDERS):
        generator.shuffle(order)
        seen: set[int] = set()
        spent = 0
        for fitting, turn in enumerate(order[:count]):
            new = [position for position in needs[turn] if position not in seen]
            spent += sum(tokens[position] for position in new)
            if spent > budget:
                count = fitting
                break
            seen.update(new)
    generator.shuffle(order)
    return sorted(order[: max(count, 1)])
