"""Queries in, documents out, each answer stamped with the adapter version that gave it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl_bridge.retrieval.corpus import Corpus, Document
from verl_bridge.retrieval.encoder import QueryEncoder
from verl_bridge.retrieval.index import DocumentIndex


@dataclass(frozen=True)
class Retrieved:
    """The answer to one query.

    Args:
        ids: document ids by descending score.
        scores: their inner products with the query.
        documents: the documents themselves.
        adapter_version: the adapter that encoded the query.
        error: why the retrieval failed; None for an answer, also one without documents.
    """

    ids: tuple[str, ...]
    scores: tuple[float, ...]
    documents: tuple[Document, ...]
    adapter_version: int
    error: str | None = None

    @property
    def status(self) -> str:
        """``ok`` or ``error``, as the search trace names it."""
        return "ok" if self.error is None else "error"

    def to_dict(self) -> dict[str, Any]:
        """Plain containers with ``status`` among them, ready for JSON."""
        return {
            "status": self.status,
            "error": self.error,
            "ids": list(self.ids),
            "scores": list(self.scores),
            "documents": [asdict(document) for document in self.documents],
            "adapter_version": self.adapter_version,
        }


def check_call(queries: Sequence[str], top_k: int) -> list[str]:
    """The queries as text that a tokenizer can read: half of a surrogate pair becomes a question mark.

    Raises:
        ValueError: ``queries`` is no sequence of strings, or ``top_k`` no integer of at least 1.
    """
    if isinstance(queries, str) or not isinstance(queries, Sequence) or not all(isinstance(q, str) for q in queries):
        raise ValueError(f"queries are {str(queries)[:80]!r}; give a list of strings")
    if type(top_k) is not int or top_k < 1:
        raise ValueError(f"top_k is {top_k!r}; ask for at least 1 document, as an integer")
    return [query.encode("utf-8", "replace").decode() for query in queries]


class Retriever:
    """Encodes queries with the current adapter and searches the frozen index.

    Nothing is cached across calls, so no answer can outlive its adapter. Not thread-safe; the actor serialises calls.

    Args:
        corpus: the documents.
        index: their index.
        encoder: the query encoder, whose ``adapter_version`` stamps the answers.
        top_k: candidates per query unless a call says otherwise.
    """

    def __init__(self, corpus: Corpus, index: DocumentIndex, encoder: QueryEncoder, top_k: int = 10) -> None:
        if top_k < 1:
            raise ValueError(f"retriever.top_k is {top_k}; ask for at least 1 document")
        if index.dim != encoder.dim:
            raise ValueError(f"the index has dimension {index.dim} but the encoder {encoder.dim}; rebuild the index")
        if len(index) != len(corpus):
            raise ValueError(f"the index holds {len(index)} documents but the corpus {len(corpus)}; rebuild the index")
        self.corpus, self.index, self.encoder, self.top_k = corpus, index, encoder, top_k

    @property
    def version(self) -> int:
        """The version of the adapter that serves now."""
        return self.encoder.adapter_version

    def search(self, queries: Sequence[str], top_k: int | None = None) -> list[Retrieved]:
        """One answer per query, in order; equal queries are encoded once. A blank query gets an error answer.

        Raises:
            ValueError: queries or ``top_k`` of another type or range, or the query encoder diverged.
        """
        top_k = self.top_k if top_k is None else top_k
        queries, version = check_call(queries, top_k), self.version
        blank = Retrieved((), (), (), version, error="the query is empty")
        unique = list(dict.fromkeys(query for query in queries if query.strip()))
        hits = self.index.search(self.encoder.encode_queries(unique).cpu(), top_k)
        answers = {}
        for query, hit in zip(unique, hits, strict=True):
            documents = tuple(self.corpus[row] for row in hit.rows)
            answers[query] = Retrieved(tuple(d.id for d in documents), hit.scores, documents, version)
        return [answers.get(query, blank) for query in queries]

    def load_adapter(self, directory: str | os.PathLike, version: int) -> None:
        """Serves a saved adapter from the next search on."""
        self.encoder.load_adapter(directory, version)
