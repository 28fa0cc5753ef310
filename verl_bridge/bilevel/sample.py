"""A token budget for an update: a sample of its turns that favours none, whatever their lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence

COUNTING_ORDERS = 8


def sample_turns(needs: Sequence[Sequence[int]], tokens: Sequence[int], budget: int, seed: int) -> list[int]:
    """Turns whose sequences fit into ``budget`` tokens, each counted once however many turns share it.

    Filling a budget turn by turn would favour short turns, since a long one is the likelier to be refused. So the
    number of turns comes first, from other random orders: the least number that fits from the start of each of
    COUNTING_ORDERS orders. A fresh order then says which turns [ours]. Given the number, every set of that size is
    equally likely.

    One draw in nine at most exceeds the budget, besides that of a single turn which alone is larger. Where lengths are
    alike it is by little; where a few turns are far longer than the rest and one of them is drawn, its whole length
    comes on top, which may be many times the budget. What turns of one question share is mostly lost in a small
    sample, which seldom holds several of them: of 256 turns on 16 questions with ten of 18 documents each, nine tenths
    of the tokens that all need pay for a fifth of the turns.

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
