"""What a retriever update learns from: plain columns, so that any host can fill and ship them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RetrieverBatch:
    """Retrieval turns to learn from; every sequence has one entry per turn.

    Args:
        queries: the query strings as they were served.
        candidate_ids: document ids per turn, at least two, by descending served score.
        answer_log_likelihood: ℓ_d per turn and candidate, natural log.
        advantages: the rollout's trajectory-level advantage, before GCA.
        rl_mask: False keeps a turn out of the RL credit (it stays in the RAG loss).
        adapter_version: the adapter that served the turn.
        hits: whether each candidate holds a gold alias, only for metrics; None leaves those out.
    """

    queries: Sequence[str]
    candidate_ids: Sequence[Sequence[str]]
    answer_log_likelihood: Sequence[Sequence[float]]
    advantages: Sequence[float]
    rl_mask: Sequence[bool]
    adapter_version: Sequence[int]
    hits: Sequence[Sequence[bool]] | None = None

    def __post_init__(self) -> None:
        columns = {name: getattr(self, name) for name in self.__dataclass_fields__}
        sizes = {name: len(column) for name, column in columns.items() if column is not None}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the columns of a retriever batch differ in length: {sizes}")
        for turn, (ids, values) in enumerate(zip(self.candidate_ids, self.answer_log_likelihood, strict=True)):
            if len(ids) != len(values) or len(ids) < 2:
                raise ValueError(
                    f"turn {turn} has {len(ids)} candidates and {len(values)} log-likelihoods; "
                    "give equally many, at least two, and leave other turns out"
                )
            if self.hits is not None and len(self.hits[turn]) != len(ids):
                raise ValueError(
                    f"turn {turn} has {len(ids)} candidates and {len(self.hits[turn])} hits; give equally many"
                )
