"""A FAISS index over the frozen document vectors, tied to its corpus and encoder by a manifest."""

from __future__ import annotations

import json
import os
import struct
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

INDEX_FILES = ("manifest.json", "embeddings.npy", "index.faiss")
_ENCODER_KEYS = ("fingerprint", "pooling", "normalised", "dim")
_MANIFEST_KEYS = {
    "format": int,
    "encoder": str,
    "fingerprint": str,
    "pooling": str,
    "normalised": bool,
    "dim": int,
    "passage_prefix": str,
    "max_length": int | None,
    "documents": int,
    "corpus": dict,
}


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


def read_manifest(directory: str | os.PathLike) -> dict[str, Any]:
    """The manifest of a complete index folder.

    Raises:
        ValueError: a file of the index is missing, or the manifest cannot be used; names the file and the fix.
    """
    directory = Path(directory)
    missing = [file for file in INDEX_FILES if not (directory / file).is_file()]
    if missing:
        raise ValueError(
            f"index folder {directory} lacks {', '.join(missing)}; build it with `verl-bridge index build`"
        )
    try:
        manifest = json.loads((directory / "manifest.json").read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("it is not a JSON object")
        for key, kind in _MANIFEST_KEYS.items():
            if not isinstance(manifest.get(key), kind):
                raise ValueError(f"{key} is {manifest.get(key)!r}")
        if not isinstance(manifest["corpus"].get("sha256"), str) or not isinstance(manifest["corpus"].get("size"), int):
            raise ValueError(f"corpus is {manifest['corpus']!r}")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged("manifest.json", directory, error) from error
    return manifest


def read_vectors(directory: str | os.PathLike) -> np.ndarray:
    """The stored vectors of an index folder as a memory map, (documents, dim). Raises ValueError on a damaged file."""
    import numpy as np

    try:
        vectors = np.load(Path(directory) / "embeddings.npy", mmap_mode="r", allow_pickle=False)
        if vectors.ndim != 2 or vectors.dtype not in (np.float32, np.float16):
            raise ValueError(f"it holds {vectors.dtype} of shape {vectors.shape}")
    except (OSError, ValueError, EOFError) as error:
        raise _damaged("embeddings.npy", directory, error) from error
    return vectors


def check_index(directory: str | os.PathLike) -> dict[str, Any]:
    """The manifest of an index whose files agree in their headers and sizes: no corpus, no model, no vector is read.

    Raises:
        ValueError: a file is missing, damaged or from another build; names it and the fix.
    """
    manifest, vectors, file = read_manifest(directory), read_vectors(directory), Path(directory) / "index.faiss"
    said = (manifest["documents"], manifest["dim"])
    if vectors.shape != said:
        raise _damaged("embeddings.npy", directory, f"its shape is {vectors.shape}, manifest.json says {said}")
    with file.open("rb") as header:
        start = header.read(16)  # FAISS: four letters, the dimension as int32, the number of vectors as int64
    if len(start) < 16 or struct.unpack("<iq", start[4:]) != said[::-1]:
        raise _damaged("index.faiss", directory, f"its header does not say {said[0]} documents of dimension {said[1]}")
    if manifest.get("factory") == "Flat" and file.stat().st_size < 4 * said[0] * said[1]:
        raise _damaged("index.faiss", directory, f"it ends after {file.stat().st_size} bytes")
    return manifest


def _damaged(file: str, directory: str | os.PathLike, error: Exception | str) -> ValueError:
    return ValueError(f"{file} of index {directory} is damaged: {error}; rebuild it with `verl-bridge index build`")


def _empty_faiss(dim: int, factory: str) -> Any:
    import faiss

    try:
        return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(f"index factory {factory!r} is unknown to FAISS for {dim} dimensions; try 'Flat'") from error


def _fill_faiss(index: Any, vectors: np.ndarray, factory: str, batch_size: int) -> None:
    import numpy as np

    count = len(vectors)
    try:
        if not index.is_trained:
            rows = np.sort(np.random.default_rng(0).permutation(count)[:200_000])
            index.train(vectors[rows].astype(np.float32))
        for start in range(0, count, batch_size):
            index.add(vectors[start : start + batch_size].astype(np.float32))
    except RuntimeError as error:
        raise ValueError(
            f"index factory {factory!r} cannot be made from {count} documents ({error}); use 'Flat' or fewer clusters"
        ) from error


def _replaceable(directory: Path) -> bool:
    """Only what was an index, or an empty folder, may be deleted for a new one."""
    return directory.is_dir() and ((directory / "manifest.json").is_file() or not any(directory.iterdir()))


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
            overwrite: replace an existing index.
            progress: called after each batch.

        Raises:
            ValueError: bad dtype or factory, or ``directory`` exists and may not be replaced: without ``overwrite``,
                or because it is no index.
        """
        import faiss
        import numpy as np

        directory = Path(directory)
        if dtype not in ("float32", "float16"):
            raise ValueError(f"index dtype {dtype!r} is not supported; use 'float32' or 'float16'")
        if directory.exists() and not overwrite:
            raise ValueError(f"index folder {directory} exists; load it, pass overwrite=True or choose another")
        if directory.exists() and not _replaceable(directory):
            raise ValueError(f"{directory} is no index (it holds no manifest.json) and is not replaced; choose another")
        index = _empty_faiss(encoder.base.dim, factory)  # a bad string is refused before hours of encoding
        with new_folder(directory) as folder:
            shape = (len(corpus), encoder.base.dim)
            vectors = np.lib.format.open_memmap(folder / "embeddings.npy", mode="w+", dtype=dtype, shape=shape)
            _encode_all(vectors, corpus, encoder, batch_size, progress)
            vectors.flush()
            _fill_faiss(index, vectors, factory, batch_size)
            faiss.write_index(index, str(folder / "index.faiss"))
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
            ValueError: incomplete or damaged folder, unequal document counts, other dimension, corpus or encoder;
                both values and the fix are named.
        """
        import faiss

        directory = Path(directory)
        manifest, embeddings = read_manifest(directory), read_vectors(directory)
        rebuild = f"rebuild {directory} from this corpus and encoder, or point to the ones it was built from"
        if manifest["format"] != FORMAT:
            raise ValueError(f"index format {manifest['format']} is not {FORMAT}; {rebuild}")
        try:
            index = faiss.read_index(str(directory / "index.faiss"))
        except (RuntimeError, MemoryError) as error:
            raise _damaged("index.faiss", directory, error) from error
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
