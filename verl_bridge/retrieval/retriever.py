"""Queries in, documents out, each answer stamped with the adapter version that gave it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_bridge.retrieval.corpus import Corpus, Document
from verl_bridge.retrieval.encoder import QueryEncoder
from verl_bridge.retrieval.index import DocumentIndex
from verl_bridge.retrieval.serving import ServingEncoder
from verl_bridge.trace import readable

Call = tuple[list[str], int]
"""Queries, and how many documents each is to get."""


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
            "documents": [{"id": d.id, "title": d.title, "text": d.text} for d in self.documents],
            "adapter_version": self.adapter_version,
        }


def search_text(query: str, question: str, query_input: str) -> str:
    """What is encoded for a search, the same in rollouts and in training.

    Args:
        query: the model's.
        question: the rollout's.
        query_input: ``query``, or ``question_query``: both, the question first [ours]. A blank query stays blank.
    """
    return f"{question} {query}" if query_input == "question_query" and query.strip() else query


def check_call(queries: Sequence[str], top_k: int) -> list[str]:
    """The queries as text that a tokenizer can read: half of a surrogate pair becomes a question mark.

    Raises:
        ValueError: ``queries`` is not a sequence of strings, or ``top_k`` not an integer of at least 1.
    """
    if isinstance(queries, str) or not isinstance(queries, Sequence) or not all(isinstance(q, str) for q in queries):
        raise ValueError(f"queries are {str(queries)[:80]!r}; give a list of strings")
    if type(top_k) is not int or top_k < 1:
        raise ValueError(f"top_k is {top_k!r}; ask for at least 1 document, as an integer")
    return [readable(query) for query in queries]


class Retriever:
    """Encodes queries with the current adapter and searches the frozen index.

    Nothing is cached across calls, so no answer can outlive its adapter. Not thread-safe; the actor serialises calls.

    Args:
        corpus: the documents.
        index: their index.
        encoder: the query encoder, whose ``adapter_version`` stamps the answers, or its faster serving copy.
        top_k: candidates per query unless a call says otherwise.

    Raises:
        ValueError: ``top_k`` below 1, or an index of another size than the corpus or dimension than the encoder.
    """

    def __init__(
        self, corpus: Corpus, index: DocumentIndex, encoder: QueryEncoder | ServingEncoder, top_k: int = 10
    ) -> None:
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

    def scores(self, queries: Sequence[str], ids: Sequence[Sequence[str]]) -> list[list[float]]:
        """Inner products of every query with the stored vectors of its documents. Raises KeyError for an unknown id."""
        vectors = self.encoder.encode_queries(check_call(queries, 1)).cpu()
        return [(self.index.vectors(row) @ query).tolist() for row, query in zip(ids, vectors, strict=True)]

    def load_adapter(self, source: str | os.PathLike | bytes, version: int) -> None:
        """Serves a saved adapter, a folder or its file's bytes, from the next search on; see ``QueryEncoder``."""
        self.encoder.load_adapter(source, version)


def answer_calls(retriever: Retriever, calls: Sequence[Call], max_batch: int) -> list[list[dict[str, Any]]]:
    """The answers to several calls that share encoder batches, as :meth:`Retrieved.to_dict` gives them.

    Args:
        retriever: searches; its adapter does not change meanwhile.
        calls: whose queries :func:`check_call` has passed.
        max_batch: most queries in one encoder batch. A call may hold more.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for depth in {top_k for _, top_k in calls}:  # nearly always one
        group = [i for i, (_, top_k) in enumerate(calls) if top_k == depth]
        queries = [query for i in group for query in calls[i][0]]
        parts = (retriever.search(queries[i : i + max_batch], depth) for i in range(0, len(queries), max_batch))
        answers = (answer.to_dict() for part in parts for answer in part)
        found |= {i: [next(answers) for _ in calls[i][0]] for i in group}
    return [found[i] for i in range(len(calls))]


def open_retriever(
    *,
    corpus: str | os.PathLike,
    index: str | os.PathLike,
    encoder: str | None = None,
    family: str | None = None,
    revision: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    lora_rank: int = 16,
    top_k: int = 10,
    compute_dtype: str = "float32",
    search_dtype: str = "auto",
    search_parameters: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    searcher: Any = None,
    searchable: bool = True,
    verify: bool = True,
) -> Retriever:
    """Opens corpus, encoder and index, checked against one another.

    Args:
        corpus: JSONL or JSONL.gz.
        index: a folder made by ``verl-bridge index build``, or a bare FAISS file such as Search-R1's ``e5_Flat.index``.
        encoder: sentence-transformers folder or hub name. What is left at None, here and down to ``max_length``, is
            taken from the index's manifest, which a bare FAISS file does not have.
        family: e5, bge, gte, minilm or contriever: their prefixes, pooling and normalisation at once.
        revision: hub revision of the encoder.
        query_prefix: put before every query.
        passage_prefix: what the passages were encoded with; only compared with the manifest.
        pooling: ``mean`` or ``cls``.
        normalize: whether vectors have length 1.
        max_length: longest text in tokens.
        lora_rank: rank of the query adapter.
        top_k: candidates per query unless a call says otherwise.
        compute_dtype: number format the queries are encoded in; see ``precision.resolve_dtype``.
        search_dtype: number format of the first pass of an exact search.
        search_parameters: FAISS's, such as ``nprobe=32``; None are the manifest's.
        device: torch device of encoder and search.
        seed: of the adapter's start.
        searcher: searches the index's vectors elsewhere; see ``DocumentIndex.load``.
        searchable: False for whoever only looks vectors up, such as a learner: nothing is made ready for search.
        verify: compare the checksums of the index's files, which reads them once.

    Raises:
        ValueError: something is missing, damaged or not made for the rest; names it and the fix.
    """
    from verl_bridge.retrieval.encoder import load_encoders
    from verl_bridge.retrieval.manifest import encoder_settings

    given = {
        "encoder": encoder,
        "family": family,
        "revision": revision,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
        "pooling": pooling,
        "normalize": normalize,
        "max_length": max_length,
    }
    settings = encoder_settings(index, given)
    name = settings.pop("encoder")
    if not name:
        raise ValueError(f"{index} does not say which encoder made it; give the encoder")
    opened = Corpus.open(corpus)
    queries, documents = load_encoders(name, lora_rank=lora_rank, device=device, seed=seed, **settings)
    loaded = DocumentIndex.load(
        index,
        opened,
        documents,
        search_dtype=search_dtype,
        device=device,
        search_parameters=search_parameters,
        searcher=searcher,
        searchable=searchable,
        verify=verify,
    )
    return Retriever(opened, loaded, ServingEncoder(queries, compute_dtype), top_k)
