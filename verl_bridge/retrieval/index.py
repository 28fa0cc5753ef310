"""A FAISS index over the frozen document vectors, tied to its corpus and encoder by a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge import __version__
from verl_bridge.files import new_folder
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.encoder import DocumentEncoder, QueryEncoder

if TYPE_CHECKING:
    import numpy as np
    import torch

FORMAT = 1

ProgressCallback = Callable[[int, int], None]
"""Called with (documents done, documents in all)."""

_ENCODER_KEYS = ("fingerprint", "pooling", "normalised", "dim")


@dataclass(frozen=True)
class Hits:
    """The nearest documents of one query by descending score; fewer than asked for when there are no more."""

    rows: tuple[int, ...]
    scores: tuple[float, ...]


def _encode_all(
    vectors: np.ndarray, corpus: Corpus, encoder: DocumentEncoder, batch_size: int, progress: ProgressCallback | None
) -> None:
    """Fills (documents, dim) batch by batch: only one batch of text and vectors is held."""
    for start in range(0, len(corpus), batch_size):
        end = min(start + batch_size, len(corpus))
        vectors[start:end] = encoder.encode_documents([corpus[row].contents for row in range(start, end)]).cpu().numpy()
        if progress is not None:
            progress(end, len(corpus))


def _faiss_over(vectors: np.ndarray, factory: str, batch_size: int) -> Any:
    import faiss
    import numpy as np

    count, dim = vectors.shape
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(f"index factory {factory!r} is unknown to FAISS for {dim} dimensions; try 'Flat'") from error
    if not index.is_trained:
        rows = np.sort(np.random.default_rng(0).permutation(count)[:200_000])
        index.train(vectors[rows].astype(np.float32))
    for start in range(0, count, batch_size):
        index.add(vectors[start : start + batch_size].astype(np.float32))
    return index


class DocumentIndex:
    """Search over frozen document vectors, and look-up of the vectors themselves.

    Args:
        corpus: the documents; row i of the index is document i of the corpus.
        index: a FAISS index with inner product.
        embeddings: the stored vectors, shape (documents, dim), usually a memory map.
        manifest: what the index was built from.
    """

    def __init__(self, corpus: Corpus, index: Any, embeddings: np.ndarray, manifest: dict[str, Any]) -> None:
        self.corpus, self.index, self.embeddings, self.manifest = corpus, index, embeddings, manifest
        self.dim = int(embeddings.shape[1])

    def __len__(self) -> int:
        return len(self.embeddings)

    @classmethod
    def build(
        cls,
        corpus: Corpus,
        encoder: DocumentEncoder,
        directory: str | os.PathLike,
        *,
        factory: str = "Flat",
        dtype: str = "float32",
        batch_size: int = 256,
        overwrite: bool = False,
        progress: ProgressCallback | None = None,
    ) -> DocumentIndex:
        """Encodes the corpus into embeddings.npy, index.faiss and manifest.json; the folder appears when complete.

        Args:
            corpus: the documents.
            encoder: encodes ``Document.contents``.
            directory: the index folder.
            factory: FAISS factory string, exact search by default.
            dtype: of the stored vectors, ``float32`` or ``float16``.
            batch_size: documents in memory at a time.
            overwrite: replace an existing folder.
            progress: called after each batch.

        Raises:
            ValueError: bad dtype or factory, or the folder exists and may not be replaced.
        """
        import faiss
        import numpy as np

        directory = Path(directory)
        if dtype not in ("float32", "float16"):
            raise ValueError(f"index dtype {dtype!r} is not supported; use 'float32' or 'float16'")
        if directory.exists() and not overwrite:
            raise ValueError(f"index folder {directory} exists; load it, pass overwrite=True or choose another")
        with new_folder(directory) as folder:
            shape = (len(corpus), encoder.base.dim)
            vectors = np.lib.format.open_memmap(folder / "embeddings.npy", mode="w+", dtype=dtype, shape=shape)
            _encode_all(vectors, corpus, encoder, batch_size, progress)
            vectors.flush()
            faiss.write_index(_faiss_over(vectors, factory, batch_size), str(folder / "index.faiss"))
            manifest = {
                "format": FORMAT,
                "verl_bridge": __version__,
                **encoder.describe(),
                "factory": factory,
                "dtype": dtype,
                "documents": len(corpus),
                "corpus": {"sha256": corpus.sha256, "size": corpus.size},
            }
            (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        return cls.load(directory, corpus, encoder)

    @classmethod
    def load(
        cls, directory: str | os.PathLike, corpus: Corpus, encoder: QueryEncoder | DocumentEncoder | None = None
    ) -> DocumentIndex:
        """Opens an index and checks it against the corpus and, when given, the encoder.

        Raises:
            ValueError: incomplete folder, unequal document counts, other dimension, corpus or encoder; both values
                and the fix are named.
        """
        import faiss
        import numpy as np

        directory = Path(directory)
        missing = [f for f in ("manifest.json", "embeddings.npy", "index.faiss") if not (directory / f).is_file()]
        if missing:
            raise ValueError(f"index folder {directory} lacks {', '.join(missing)}; build the index for this corpus")
        manifest = json.loads((directory / "manifest.json").read_text())
        rebuild = f"rebuild {directory} from this corpus and encoder, or point to the ones it was built from"
        if manifest.get("format") != FORMAT:
            raise ValueError(f"index format {manifest.get('format')} is not {FORMAT}; {rebuild}")
        index = faiss.read_index(str(directory / "index.faiss"))
        embeddings = np.load(directory / "embeddings.npy", mmap_mode="r", allow_pickle=False)
        counts = {"index.faiss": index.ntotal, "embeddings.npy": len(embeddings)}
        for file, count in counts.items():
            if count != len(corpus):
                raise ValueError(f"{file} holds {count} documents but the corpus {len(corpus)}; {rebuild}")
        dims = {"index.faiss": index.d, "embeddings.npy": embeddings.shape[1]}
        for file, dim in dims.items():
            if dim != manifest["dim"]:
                raise ValueError(f"{file} has dimension {dim} but manifest.json says {manifest['dim']}; {rebuild}")
        built, now = manifest["corpus"]["sha256"], corpus.sha256
        if built != now:
            raise ValueError(f"the index was built from corpus {built[:12]}… but this corpus is {now[:12]}…; {rebuild}")
        if encoder is not None:
            settings = encoder.describe()
            # dimension first: it is the plainest message when the model is another one
            for key in ("dim", *_ENCODER_KEYS, "passage_prefix", "max_length"):
                if key in settings and settings[key] != manifest[key]:
                    raise ValueError(
                        f"the index was built with {key} {manifest[key]!r} (encoder {manifest['encoder']!r}) "
                        f"but encoder {settings['encoder']!r} has {settings[key]!r}; {rebuild}"
                    )
        return cls(corpus, index, embeddings, manifest)

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
        """The stored vectors of documents as float32, shape (ids, dim). Raises KeyError for an unknown id."""
        import torch

        rows = [self.corpus.row(document_id) for document_id in document_ids]
        return torch.from_numpy(self.embeddings[rows].astype("float32"))
