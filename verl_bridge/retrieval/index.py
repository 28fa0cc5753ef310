"""Search over the frozen document vectors, tied to their corpus and encoder by a manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge.retrieval.build import build_index
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import DocumentEncoder, QueryEncoder
from verl_bridge.retrieval.manifest import check_index, damaged, match, read_vectors

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Hits:
    """The nearest documents of one query by descending score; fewer than asked for when there are no more."""

    rows: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class StoredIndex:
    """What lies on disk, checked, and not yet made ready for search.

    Args:
        manifest: what the index was built from; of a bare FAISS file only ``documents`` and ``dim`` are known.
        vectors: the document vectors, (documents, dim), a memory map; None for a bare FAISS file that is not flat.
        faiss: the FAISS index; None where search is over the vectors.
    """

    manifest: dict[str, Any]
    vectors: np.ndarray | None
    faiss: Any


def open_index(
    path: str | os.PathLike,
    corpus: Corpus,
    encoder: QueryEncoder | DocumentEncoder | None = None,
    *,
    verify: bool = True,
) -> StoredIndex:
    """Opens an index folder or a bare FAISS file and checks it against the corpus and, when given, the encoder.

    Args:
        path: a folder made by ``index build``, or a file that ``faiss.write_index`` wrote.
        corpus: the documents; row i of the index is document i.
        encoder: whose queries are to be searched.
        verify: compare the checksums of the files, which reads them once; else only sizes and headers.

    Raises:
        ValueError: incomplete or damaged files, unequal document counts, other dimension, corpus or encoder;
            both values and the fix are named.
    """
    from verl_bridge.retrieval.faiss_index import open_bare, read_index

    path = Path(path)
    # Whether it is the right index is the first question; the checksums of a large one take a while.
    manifest = check_index(path)
    match(manifest, path, corpus, encoder)
    if path.is_file():
        index, vectors = open_bare(path)
        return StoredIndex(manifest, vectors, None if vectors is not None else index)
    if verify:
        check_index(path, verify=True)
    if manifest["factory"] == "Flat":
        return StoredIndex(manifest, read_vectors(path), None)
    try:
        index = read_index(path / "index.faiss")
    except ValueError as error:
        raise damaged("index.faiss", path, error) from error
    return StoredIndex(manifest, read_vectors(path), index)


class DocumentIndex:
    """Search over frozen document vectors, and look-up of the vectors themselves.

    Args:
        corpus: the documents; row i of the index is document i of the corpus.
        index: what searches: :class:`verl_bridge.retrieval.exact.ExactSearch` or a FAISS index with inner product.
        embeddings: the stored vectors, shape (documents, dim), usually a memory map; None where only a FAISS index
            holds them, which then gives back what it keeps of them.
        manifest: what the index was built from.
    """

    def __init__(self, corpus: Corpus, index: Any, embeddings: np.ndarray | None, manifest: dict[str, Any]) -> None:
        self.corpus, self.index, self.embeddings, self.manifest = corpus, index, embeddings, manifest
        self.dim = int(index.d)
        self._kept = index  # gives back vectors; stays on the CPU

    def __len__(self) -> int:
        return len(self.corpus)

    @classmethod
    def build(
        cls, corpus: Corpus, encoder: DocumentEncoder, directory: str | os.PathLike, **settings: Any
    ) -> DocumentIndex:
        """Builds an index folder and loads it; ``settings`` and errors as of :func:`build_index`."""
        build_index(corpus, encoder, directory, **settings)
        return cls.load(directory, corpus, encoder, verify=False)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        corpus: Corpus,
        encoder: QueryEncoder | DocumentEncoder | None = None,
        *,
        search_dtype: str = "auto",
        device: str = "cpu",
        search_parameters: str | None = None,
        searcher: Any = None,
        searchable: bool = True,
        verify: bool = True,
    ) -> DocumentIndex:
        """Opens an index as :func:`open_index` does, with its errors, and makes it ready for search.

        Args:
            path: an index folder, or a bare FAISS file such as Search-R1's ``e5_Flat.index``.
            corpus: the documents.
            encoder: whose queries are to be searched.
            search_dtype: number format of the first pass of an exact search.
            device: torch device of an exact search; ``cuda`` puts another kind on FAISS's GPU.
            search_parameters: such as ``nprobe=32``, see :func:`set_search_parameters`; None takes the manifest's.
            searcher: searches these vectors elsewhere (the call of a FAISS index); then nothing is made ready here.
            searchable: False makes nothing ready for search where the vectors are kept; they can be looked up.
            verify: compare the files' checksums.

        Raises:
            ValueError: see :func:`open_index`; also search parameters or a device that do not fit this kind of index, a
                vector that is not finite, or a ``searcher`` of another index.
        """
        from verl_bridge.retrieval.exact import ExactSearch, NoSearch
        from verl_bridge.retrieval.faiss_index import give_back_vectors, set_search_parameters, to_gpu

        stored = open_index(path, corpus, encoder, verify=verify)
        if search_parameters is None:
            search_parameters = stored.manifest.get("search_parameters")
        if search_parameters:
            set_search_parameters(stored.faiss, search_parameters)
        if not searchable and stored.vectors is not None:
            return cls(corpus, NoSearch(stored.vectors), stored.vectors, stored.manifest)
        if searcher is not None:
            here = (stored.manifest["documents"], stored.manifest["dim"])
            if (searcher.ntotal, searcher.d) != here:
                raise ValueError(
                    f"the shards hold {searcher.ntotal} documents of dimension {searcher.d} but the index here "
                    f"{here[0]} of {here[1]}; give every node the same index"
                )
            return cls(corpus, searcher, stored.vectors, stored.manifest)
        if stored.faiss is None:
            searcher = ExactSearch(stored.vectors, compute_dtype=search_dtype, device=device)
            return cls(corpus, searcher, stored.vectors, stored.manifest)
        if stored.vectors is None:
            give_back_vectors(stored.faiss)
        loaded = cls(corpus, stored.faiss, stored.vectors, stored.manifest)
        if device != "cpu":
            loaded.index = to_gpu(stored.faiss, device)
        return loaded

    def search(self, query_vectors: torch.Tensor | np.ndarray, top_k: int) -> list[Hits]:
        """The ``top_k`` documents of each query by inner product.

        Args:
            query_vectors: float32, shape (queries, dim).
            top_k: documents per query; a smaller corpus gives fewer.

        Raises:
            ValueError: wrong shape, ``top_k`` < 1, or a query vector that is not finite.
        """
        import numpy as np

        vectors = np.ascontiguousarray(query_vectors, dtype=np.float32)
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise ValueError(f"query vectors of shape {vectors.shape} do not fit an index of dimension {self.dim}")
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}; ask for at least 1 document")
        if not np.isfinite(vectors).all():
            bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1)).tolist()
            raise ValueError(
                f"query vectors {bad[:8]} are not finite; the query encoder diverged: load a saved adapter"
            )
        if not len(vectors):
            return []
        scores, rows = self.index.search(vectors, min(top_k, len(self)))
        # approximate indexes fill up with row −1 when a probe finds too few
        return [Hits(tuple(r[r >= 0].tolist()), tuple(s[r >= 0].tolist())) for r, s in zip(rows, scores, strict=True)]

    def vectors(self, document_ids: Sequence[str]) -> torch.Tensor:
        """The stored vectors of documents as float32, shape (ids, dim).

        Raises:
            KeyError: an unknown id.
            ValueError: a FAISS index of a kind that cannot give vectors back.
        """
        import numpy as np
        import torch

        rows = [self.corpus.row(document_id) for document_id in document_ids]
        if self.embeddings is not None:
            return torch.from_numpy(self.embeddings[rows].astype("float32"))
        try:
            return torch.from_numpy(self._kept.reconstruct_batch(np.array(rows, dtype=np.int64)))
        except RuntimeError as error:
            raise ValueError(
                f"a {type(self._kept).__name__} cannot give its vectors back, which learning needs; build an index "
                "with `verl-bridge index build`, which keeps them"
            ) from error


def compare_vectors(
    stored: StoredIndex, corpus: Corpus, encoder: DocumentEncoder, sample: int = 16
) -> tuple[float, int] | None:
    """Encodes a few documents again and compares them with what is stored: settings no manifest can prove show here.

    Args:
        stored: an opened index.
        corpus: its documents.
        encoder: the encoder and settings it is said to be made with.
        sample: documents to encode, evenly spread, the first and the last among them.

    Returns:
        The lowest cosine and its row; None where the vectors are not kept as they were.

    Raises:
        ValueError: a cosine of at most 0.99; names the worst row and the fix.
    """
    import numpy as np

    if stored.vectors is None:
        return None
    rows = sorted({round(row) for row in np.linspace(0, len(corpus) - 1, sample)})
    fresh = encoder.encode_documents([corpus[row].contents for row in rows]).cpu().numpy()
    kept = stored.vectors[rows].astype(np.float32)
    cosines = (fresh * kept).sum(1) / (np.linalg.norm(fresh, axis=1) * np.linalg.norm(kept, axis=1))
    cosines = np.nan_to_num(cosines, nan=-1.0)
    worst = int(cosines.argmin())
    if cosines[worst] <= 0.99:
        raise ValueError(
            f"row {rows[worst]} (document {corpus[rows[worst]].id!r}) has cosine {cosines[worst]:.3f} with the vector "
            "that this encoder gives it now; use the encoder, revision, passage prefix, pooling, normalisation and "
            "max_length that the index was made with, or rebuild it"
        )
    return float(cosines[worst]), rows[worst]
