"""Whether the retriever collapses: every query finding the same documents (a kind of failure users report)."""

from __future__ import annotations

import math

TOP1_FALL = 0.1
"""Collapsed when the share of distinct top-1 documents over distinct queries is below this part of its first value.
Paraphrases that learn to agree on a question's evidence lower the share by their number, 8 or so; a collapse lowers it
to one document over all queries [ours]."""

LOW_ENTROPY = 0.02
"""Collapsed when the mean retrieval entropy is below this part of its largest value, log(candidates) … [ours]"""

LARGE_DRIFT = 0.1
"""… while the adapter has moved from its start by more than this part of its norm [ours]."""


class CollapseWatch:
    """Judges every update by figures that it logs anyway.

    ``first_share`` is the share of distinct top-1 documents at the first update; None before.
    """

    def __init__(self) -> None:
        self.first_share: float | None = None

    def check(self, *, top1_share: float, entropy: float | None, candidates: float, drift: float) -> str | None:
        """Why the retriever counts as collapsed, or None.

        Args:
            top1_share: distinct top-1 documents over distinct queries, under the adapter that served.
            entropy: mean entropy of p(d|q) over the turns, nats; None when no step was taken.
            candidates: mean number of candidates of a turn.
            drift: norm of the adapter's change from its start over the start's norm.
        """
        if self.first_share is None:
            self.first_share = top1_share
        if top1_share < TOP1_FALL * self.first_share:
            return (
                f"distinct top-1 documents are {top1_share:.3f} of the distinct queries, {self.first_share:.3f} at the "
                "first update"
            )
        if entropy is not None and entropy < LOW_ENTROPY * math.log(candidates) and drift > LARGE_DRIFT:
            return f"retrieval entropy is {entropy:.4f} nats and the adapter has moved by {drift:.2f} of its norm"
        return None
