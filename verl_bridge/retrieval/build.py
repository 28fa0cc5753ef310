"""Building an index: streams, survives being killed, and holds no more than a batch of vectors.

The work lies in ``.NAME.building`` beside the index: vectors are appended and flushed to disk before the record of
progress moves on, so whatever the record says is there. The next build with the same settings continues.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge import __version__
from verl_bridge.files import named, new_file, put_folder, sha256
from verl_bridge.retrieval.corpus import Corpus
from verl_bridge.retrieval.manifest import FORMAT, building, data_files

if TYPE_CHECKING:
    import numpy as np

    from verl_bridge.retrieval.encoder import DocumentEncoder

ProgressCallback = Callable[[int, int], None]
"""Called with (documents done, documents in all), first before the first batch."""


def build_index(
    corpus: Corpus,
    encoder: DocumentEncoder,
    directory: str | os.PathLike,
    *,
    factory: str = "Flat",
    dtype: str = "float16",
    batch_size: int = 256,
    query_prefix: str = "",
    search_parameters: str = "",
    overwrite: bool = False,
    restart: bool = False,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Encodes the corpus into an index folder, which appears when complete; continues a build that was interrupted.

    Args:
        corpus: the documents.
        encoder: encodes ``Document.contents``.
        directory: the index folder.
        factory: FAISS factory string, inner product; ``Flat`` is exact search over the stored vectors, without FAISS.
        dtype: of the stored vectors, ``float32`` or ``float16``.
        batch_size: documents in memory at a time.
        query_prefix: noted in the manifest: what queries to this index are to begin with.
        search_parameters: noted in the manifest and used when it is loaded, such as ``nprobe=32`` or ``efSearch=64``.
        overwrite: replace an existing index.
        restart: throw away an interrupted build instead of continuing it.
        progress: called before the first batch and after each one.

    Returns:
        The manifest.

    Raises:
        ValueError: bad dtype, factory or search parameters; ``directory`` exists and may not be replaced (without
            ``overwrite``, or because it is not an index); an interrupted build with other settings is in the way, or
            another process builds the same index; a document's vector is not finite or all zeros.
        OSError: the place cannot be written.
    """
    from verl_bridge.retrieval.faiss_index import empty_index, fill_index, set_search_parameters

    directory = Path(directory)
    if dtype not in ("float32", "float16"):
        raise ValueError(f"index dtype {dtype!r} is not supported; use 'float32' or 'float16'")
    if directory.exists() and not overwrite:
        raise ValueError(f"index folder {directory} exists; load it, pass overwrite=True or choose another")
    if directory.exists() and not _replaceable(directory):
        raise ValueError(f"{directory} is not an index (it holds no manifest.json) and is not replaced; choose another")
    # a bad string is refused before hours of encoding
    index = None if factory == "Flat" else empty_index(encoder.base.dim, factory)
    if search_parameters:
        set_search_parameters(index, search_parameters)
    plan = {
        "corpus": corpus.sha256,
        "documents": len(corpus),
        "dtype": dtype,
        **{key: value for key, value in encoder.describe().items() if key != "encoder"},  # the fingerprint says more
    }
    with _work_folder(directory, restart) as work:
        done = work / "index"
        vectors = _encode_all(corpus, encoder, work, plan, batch_size, progress)
        (done / "index.faiss").unlink(missing_ok=True)  # of an interrupted build with another factory
        if index is not None:
            import faiss

            fill_index(index, vectors, factory, batch_size)
            with named(directory):
                faiss.write_index(index, str(done / "index.faiss"))
        manifest = {
            "format": FORMAT,
            "verl_bridge": __version__,
            "query_prefix": query_prefix,
            **encoder.describe(),
            "factory": factory,
            "search_parameters": search_parameters,
            "dtype": dtype,
            "documents": len(corpus),
            "corpus": {"sha256": corpus.sha256, "size": corpus.size},
            "files": {
                file: {"size": (done / file).stat().st_size, "sha256": sha256(done / file)}
                for file in data_files(factory)
            },
        }
        (done / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        with named(directory):
            put_folder(done, directory)
        shutil.rmtree(work)
    return manifest


def _replaceable(directory: Path) -> bool:
    """Only what was an index, or an empty folder, may be deleted for a new one."""
    return directory.is_dir() and ((directory / "manifest.json").is_file() or not any(directory.iterdir()))


@contextmanager
def _work_folder(directory: Path, restart: bool) -> Iterator[Path]:
    """The folder of an unfinished build, for one process at a time; the lock goes with the process, killed or not."""
    work = building(directory)
    with named(directory):
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process builds {directory}; wait for it, or choose another --out") from None
        if restart:
            (work / "progress.json").unlink(missing_ok=True)
        (work / "index").mkdir(exist_ok=True)
        yield work


def _encode_all(
    corpus: Corpus,
    encoder: DocumentEncoder,
    work: Path,
    plan: dict[str, Any],
    batch_size: int,
    progress: ProgressCallback | None,
) -> np.ndarray:
    """Appends what is missing to the vectors of an unfinished build; returns all as a memory map, (documents, dim)."""
    import numpy as np

    file, dtype = work / "index" / "embeddings.npy", np.dtype(plan["dtype"])
    shape = (len(corpus), encoder.base.dim)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    begin, width = len(header.getvalue()), shape[1] * dtype.itemsize  # bytes
    done = _documents_done(work, plan)
    if done and (not file.is_file() or file.stat().st_size < begin + done * width):
        done = 0  # the build was finished and only its leftovers were not removed
    with named(file), file.open("r+b" if done else "wb") as out:
        if not done:
            out.write(header.getvalue())
        out.truncate(begin + done * width)  # what a killed build wrote after its last record
        out.seek(0, os.SEEK_END)
        if progress is not None:
            progress(done, len(corpus))
        for start in range(done, len(corpus), batch_size):
            end = min(start + batch_size, len(corpus))
            texts = [corpus[row].contents for row in range(start, end)]
            batch = _stored(encoder.encode_documents(texts).cpu().numpy(), dtype, corpus, start)
            out.write(batch.tobytes())
            out.flush()
            os.fsync(out.fileno())
            _record(work, plan, end)
            if progress is not None:
                progress(end, len(corpus))
    return np.load(file, mmap_mode="r", allow_pickle=False)


def _stored(vectors: np.ndarray, dtype: np.dtype, corpus: Corpus, start: int) -> np.ndarray:
    """Vectors as they are stored, each one finite and not zero: no search could be right with one that is."""
    import numpy as np

    with np.errstate(over="ignore"):
        vectors = vectors.astype(dtype)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1) | ~vectors.any(axis=1))
    if len(bad):
        row = start + int(bad[0])
        what = "all zeros" if np.isfinite(vectors[bad[0]]).all() else "not finite"
        raise ValueError(
            f"the vector of document {corpus[row].id!r} (row {row}) is {what} in {dtype}; check the encoder, its "
            "compute_dtype and the document, or store float32"
        )
    return vectors


def _documents_done(work: Path, plan: dict[str, Any]) -> int:
    """How many documents an interrupted build with the same settings has behind it.

    Raises:
        ValueError: it has other settings (one is named) or its record cannot be read.
    """
    file = work / "progress.json"
    if not file.exists():
        _record(work, plan, 0)
    try:
        record = json.loads(file.read_bytes())
        done, before = int(record["done"]), dict(record["plan"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"the record of the interrupted build in {work} cannot be read ({error}); give --restart (restart=True)"
        ) from error
    now = json.loads(json.dumps(plan))
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise ValueError(
                f"an interrupted build in {work} has {key} {before.get(key)!r}, this one {now.get(key)!r}; give the "
                "settings it was begun with to continue it, or --restart (restart=True) to throw it away"
            )
    return done


def _record(work: Path, plan: dict[str, Any], done: int) -> None:
    with new_file(work / "progress.json") as file:
        json.dump({"done": done, "plan": plan}, file)
