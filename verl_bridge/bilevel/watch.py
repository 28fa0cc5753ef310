"""Whether the retriever collapses: every query finding the same documents (a kind of failure users report)."""

from __future__ import annotations

import math

TOP1_FALL = 0.1
"""Collapsed when the share of distinct top-1 documents over distinct queries is below this part of its first value.
Paraphrases that learn to agree on a question's evidence lower the share by their number, 8 or so; a collapse lowers it
to one document over all queries [ours]."""

FEWEST_QUERIES = 4
"""Collapsed also when all queries of an update, at least so many, have one and the same top-1 document, and those of
the first update had several: with few queries one document does not bring the share below TOP1_FALL [ours]. An update
on wordings of a single question can look like it."""

LOW_ENTROPY = 0.02
"""Collapsed when the mean retrieval entropy is below this part of its largest value, log(candidates) … [ours]"""

LARGE_DRIFT = 0.1
"""… while the adapter has moved from its start by more than this part of its norm [ours]."""


class CollapseWatch:
    """Judges every update by figures that it logs anyway.

    ``first_documents`` is the number of distinct top-1 documents at the first update, ``first_share`` their share of
    the distinct queries; None before.
    """

    def __init__(self) -> None:
        self.first_documents: int | None = None
        self.first_share: float | None = None

    def check(
        self, *, documents: int, queries: int, entropy: float | None, candidates: float, drift: float
    ) -> str | None:
        """Why the retriever counts as collapsed, or None.

        Args:
            documents: distinct top-1 documents of the distinct queries, under the adapter that served.
            queries: how many queries these are, at least 1.
            entropy: mean entropy of p(d|q) over the turns, nats; None when no step was taken.
            candidates: mean number of candidates of a turn.
            drift: norm of the adapter's change from its start over the start's norm.
        """
        share = documents / queries
        if self.first_share is None:
            self.first_documents, self.first_share = documents, share
        if share < TOP1_FALL * self.first_share:
            return (
                f"distinct top-1 documents are {share:.3f} of the distinct queries, {self.first_share:.3f} at the "
                "first update"
            )
        if documents == 1 and queries >= FEWEST_QUERIES and (self.first_documents or 1) > 1:
            return f"all {queries} distinct queries have one top-1 document, {self.first_documents} at the first update"
        if entropy is not None and entropy < LOW_ENTROPY * math.log(candidates) and drift > LARGE_DRIFT:
            return f"retrieval entropy is {entropy:.4f} nats and the adapter has moved by {drift:.2f} of its norm"
        return None
