"""A retriever batch as padded tensors, its document vectors looked up once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from verl_bridge.bilevel.batch import RetrieverBatch
from verl_bridge.retrieval.index import DocumentIndex
from verl_bridge.retrieval.lengths import length_groups

CHARACTERS_AT_ONCE = 4096  # of one group of queries, padding included: some 1,000 tokens


@dataclass(frozen=True)
class QueryGroup:
    """Queries to encode together, and the turns that ask them.

    Args:
        texts: the distinct queries.
        rows: the turns, ``(rows,)``.
        query: which of ``texts`` each turn asks, ``(rows,)``.
    """

    texts: list[str]
    rows: torch.Tensor
    query: torch.Tensor


@dataclass(frozen=True)
class BatchTensors:
    """A batch padded to its widest turn, on one device.

    Args:
        queries: the distinct queries.
        documents: float32 vectors of the distinct documents, ``(documents, dim)``.
        query_index: into ``queries``, ``(turns,)``.
        document_index: into ``documents``, ``(turns, candidates)``.
        mask: real candidates, ``(turns, candidates)`` bool.
        log_likelihood: ℓ_d, ``(turns, candidates)``.
        advantages, rl_mask: ``(turns,)``.
        hits: candidates that hold a gold alias, ``(turns, candidates)`` bool, or None.
    """

    queries: list[str]
    documents: torch.Tensor
    query_index: torch.Tensor
    document_index: torch.Tensor
    mask: torch.Tensor
    log_likelihood: torch.Tensor
    advantages: torch.Tensor
    rl_mask: torch.Tensor
    hits: torch.Tensor | None

    @classmethod
    def of(cls, batch: RetrieverBatch, index: DocumentIndex, device: torch.device) -> BatchTensors:
        """Raises KeyError for a document that the index does not have."""
        queries = {query: i for i, query in enumerate(dict.fromkeys(batch.queries))}
        ids = {d: i for i, d in enumerate(dict.fromkeys(d for row in batch.candidate_ids for d in row))}

        def padded(rows: Iterable[Sequence], dtype: torch.dtype) -> torch.Tensor:
            return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True).to(device)

        return cls(
            queries=list(queries),
            documents=index.vectors(list(ids)).to(device),
            query_index=torch.tensor([queries[query] for query in batch.queries], device=device),
            document_index=padded([[ids[d] for d in row] for row in batch.candidate_ids], torch.long),
            mask=padded([[1] * len(row) for row in batch.candidate_ids], torch.bool),
            log_likelihood=padded(batch.answer_log_likelihood, torch.float32),
            advantages=torch.tensor(list(batch.advantages), dtype=torch.float32, device=device),
            rl_mask=torch.tensor(list(batch.rl_mask), dtype=torch.bool, device=device),
            hits=None if batch.hits is None else padded(batch.hits, torch.bool),
        )

    def __len__(self) -> int:
        return len(self.query_index)

    def groups(self, rows: torch.Tensor, queries_at_once: int) -> Iterator[QueryGroup]:
        """The turns ``rows`` in groups of at most so many distinct queries, fewer when they are long."""
        used = self.query_index[rows].unique()
        for positions in length_groups([self.queries[i] for i in used.tolist()], queries_at_once, CHARACTERS_AT_ONCE):
            group = used[sorted(positions)]
            part = rows[torch.isin(self.query_index[rows], group)]
            texts = [self.queries[i] for i in group.tolist()]
            yield QueryGroup(texts, part, torch.searchsorted(group, self.query_index[part]))

    def scores(self, vectors: torch.Tensor, group: QueryGroup) -> torch.Tensor:
        """Inner products of a group's query vectors ``(texts, dim)`` with the candidates, ``(rows, candidates)``."""
        return torch.einsum("td,tcd->tc", vectors[group.query], self.documents[self.document_index[group.rows]])

    def counts(self, rows: torch.Tensor) -> dict[str, int]:
        """Of the turns ``rows``: all, those with RL credit, the candidates of those, and those with a hit."""
        mask, rl = self.mask[rows], self.rl_mask[rows]
        hits = 0 if self.hits is None else int((self.hits[rows] & mask).any(dim=-1).sum())
        return {
            "turns": len(rows),
            "rl_turns": int(rl.sum()),
            "rl_candidates": int(mask[rl].sum()),
            "hit_turns": hits,
        }

    def top_documents(self, log_probs: torch.Tensor) -> torch.Tensor:
        """The likeliest document of every distinct query at its first turn that is not NaN, ``(queries,)`` or fewer."""
        first = torch.full((len(self.queries),), len(self), device=self.query_index.device)
        turns = torch.arange(len(self), device=first.device)
        known = ~log_probs.isnan().any(dim=-1)
        first = first.scatter_reduce(0, self.query_index[known], turns[known], "amin")
        first = first[first < len(self)]
        return self.document_index[first].gather(1, log_probs[first].argmax(-1, keepdim=True)).squeeze(1)
