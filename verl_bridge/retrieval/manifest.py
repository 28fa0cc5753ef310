"""What an index folder says about itself, and whether its files are what was written.

A folder made by ``verl-bridge index build`` holds ``manifest.json``, ``embeddings.npy`` (the document vectors, which
are the index for exact search) and, for other FAISS factories, ``index.faiss``. A bare FAISS file, such as Search-R1's
``e5_Flat.index``, says no more than its own header.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge.files import sha256
from verl_bridge.retrieval.families import FAMILIES

if TYPE_CHECKING:
    import numpy as np

    from verl_bridge.retrieval.corpus import Corpus
    from verl_bridge.retrieval.encoder import DocumentEncoder, QueryEncoder

FORMAT = 2
DATA_FILES = ("embeddings.npy", "index.faiss")
BUILD = "`verl-bridge index build`"

_KEYS = {
    "format": int,
    "encoder": str,
    "fingerprint": str,
    "pooling": str,
    "normalised": bool,
    "dim": int,
    "passage_prefix": str,
    "max_length": int | None,
    "factory": str,
    "documents": int,
    "corpus": dict,
    "files": dict,
}
_ENCODER_KEYS = ("dim", "fingerprint", "pooling", "normalised", "passage_prefix", "max_length")


def data_files(factory: str) -> tuple[str, ...]:
    """The files of an index beside its manifest. Exact search reads the vectors themselves."""
    return DATA_FILES[:1] if factory == "Flat" else DATA_FILES


def building(directory: str | os.PathLike) -> Path:
    """Where the work of a build lies until it is complete."""
    return Path(directory).parent / f".{Path(directory).name}.building"


def damaged(file: str, directory: str | os.PathLike, error: Exception | str) -> ValueError:
    """The error for a file that cannot be used."""
    return ValueError(f"{file} of index {directory} is damaged: {error}; rebuild it with {BUILD}")


def read_manifest(directory: str | os.PathLike) -> dict[str, Any]:
    """The manifest of a complete index folder.

    Raises:
        ValueError: a file of the index is missing, or the manifest is of another format or cannot be used; names the
            file and the fix.
    """
    directory = Path(directory)
    if not (directory / "manifest.json").is_file():
        missing = [file for file in ("manifest.json", DATA_FILES[0]) if not (directory / file).is_file()]
        begun = f"; {building(directory)} is an interrupted build of it, which continues" * building(directory).is_dir()
        raise ValueError(f"index folder {directory} lacks {', '.join(missing)}; build it with {BUILD}{begun}")
    try:
        manifest = json.loads((directory / "manifest.json").read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("it is not a JSON object")
        if isinstance(manifest.get("format"), int) and manifest["format"] != FORMAT:
            raise _Format(manifest["format"])
        for key, kind in _KEYS.items():
            if not isinstance(manifest.get(key), kind):
                raise ValueError(f"{key} is {manifest.get(key)!r}")
        if not isinstance(manifest["corpus"].get("sha256"), str) or not isinstance(manifest["corpus"].get("size"), int):
            raise ValueError(f"corpus is {manifest['corpus']!r}")
        for file in data_files(manifest["factory"]):
            said = manifest["files"].get(file)
            if not isinstance(said, dict) or not isinstance(said.get("size"), int) or "sha256" not in said:
                raise ValueError(f"files say {said!r} of {file}")
    except _Format as error:
        raise ValueError(
            f"index {directory} has format {error}, this version reads {FORMAT}; rebuild it with {BUILD}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged("manifest.json", directory, error) from error
    missing = [file for file in data_files(manifest["factory"]) if not (directory / file).is_file()]
    if missing:
        raise ValueError(f"index folder {directory} lacks {', '.join(missing)}; build it with {BUILD}")
    return manifest


class _Format(ValueError):
    """Another format, which is not damage."""


def read_vectors(directory: str | os.PathLike) -> np.ndarray:
    """The stored vectors of an index folder as a memory map, (documents, dim). Raises ValueError on a damaged file."""
    import numpy as np

    try:
        vectors = np.load(Path(directory) / DATA_FILES[0], mmap_mode="r", allow_pickle=False)
        if vectors.ndim != 2 or vectors.dtype not in (np.float32, np.float16):
            raise ValueError(f"it holds {vectors.dtype} of shape {vectors.shape}")
    except (OSError, ValueError, EOFError) as error:
        raise damaged(DATA_FILES[0], directory, error) from error
    return vectors


def faiss_header(file: str | os.PathLike) -> tuple[bytes, int, int]:
    """Kind (four letters), number of vectors and dimension of a FAISS file. Raises ValueError when it is not one."""
    with Path(file).open("rb") as opened:
        start = opened.read(16)
    # FAISS: four letters, the dimension as int32, the number of vectors as int64
    kind, dim, count = struct.unpack("<4siq", start) if len(start) == 16 else (b"", 0, 0)
    if not kind.startswith(b"I") or dim < 1 or count < 0:
        raise ValueError(f"{file} is not a FAISS index; give an index folder or a file that faiss.write_index wrote")
    return kind, count, dim


def check_index(path: str | os.PathLike, *, verify: bool = False) -> dict[str, Any]:
    """The manifest of an index whose files agree in sizes and headers: no corpus, no model, no vector is read.

    Args:
        path: an index folder, or a bare FAISS file, which leaves all but ``documents`` and ``dim`` at None.
        verify: compare the files' checksums too, which reads them once.

    Raises:
        ValueError: a file is missing, damaged or from another build; names it and the fix.
    """
    path = Path(path)
    if path.is_file():
        _, documents, dim = faiss_header(path)
        return {**dict.fromkeys(_KEYS), "documents": documents, "dim": dim}
    manifest = read_manifest(path)
    said = (manifest["documents"], manifest["dim"])
    if read_vectors(path).shape != said:
        raise damaged(DATA_FILES[0], path, f"its shape is {read_vectors(path).shape}, manifest.json says {said}")
    for file in data_files(manifest["factory"]):
        size, wanted = (path / file).stat().st_size, manifest["files"][file]
        if size != wanted["size"]:
            raise damaged(file, path, f"it has {size} bytes, manifest.json says {wanted['size']}")
        if file == "index.faiss":
            try:
                header = faiss_header(path / file)[1:]
            except ValueError:
                header = None
            if header != said:
                reason = f"its header does not say {said[0]} documents of dimension {said[1]}"
                raise damaged(file, path, reason)
        if verify and sha256(path / file) != wanted["sha256"]:
            raise damaged(file, path, "its SHA-256 is not the one in manifest.json")
    return manifest


def manifest_settings(path: str | os.PathLike) -> dict[str, Any]:
    """The encoder settings an index was made with, as keywords of ``load_encoders``; a bare FAISS file has none.

    Raises:
        ValueError: no index there, or its manifest cannot be used.
    """
    path = Path(path)
    if path.is_file():
        return {}
    manifest = read_manifest(path)
    keys = ("encoder", "revision", "family", "query_prefix", "passage_prefix", "max_length")
    settings = {key: manifest.get(key) for key in keys}
    pooling = manifest["pooling"] if manifest["pooling"] in ("mean", "cls") else None  # else the model's own
    # normalised vectors may come from the model itself, which then refuses to be told not to
    return {**settings, "pooling": pooling, "normalize": manifest["normalised"] or None}


def encoder_settings(path: str | os.PathLike, given: dict[str, Any]) -> dict[str, Any]:
    """Settings of an encoder for an index: what is given, else what a given family says, else what made the index.

    Args:
        path: the index.
        given: keywords of ``load_encoders``, and ``encoder``; None where nothing was given.
    """
    known = manifest_settings(path)
    if given.get("family") is not None:  # speaks for these four, and what does not fit the index is then refused
        known = {key: value for key, value in known.items() if key not in vars(FAMILIES["e5"])}
    return {key: known.get(key) if value is None else value for key, value in given.items()}


def match(
    manifest: dict[str, Any], path: str | os.PathLike, corpus: Corpus, encoder: QueryEncoder | DocumentEncoder | None
) -> None:
    """Whether an index was built from this corpus and, when given, with this encoder.

    Raises:
        ValueError: unequal document counts, another corpus, dimension or encoder; both values and the fix are named.
    """
    bare = manifest["format"] is None
    made = "give the corpus and encoder it was made from"
    fix = made if bare else f"rebuild {path} from this corpus and encoder, or point to the ones it was built from"
    if manifest["documents"] != len(corpus):
        raise ValueError(f"index {path} holds {manifest['documents']} documents but the corpus {len(corpus)}; {fix}")
    if not bare and manifest["corpus"]["sha256"] != corpus.sha256:
        built = manifest["corpus"]["sha256"]
        raise ValueError(
            f"the index was built from corpus {built[:12]}… but this corpus is {corpus.sha256[:12]}…; {fix}"
        )
    if encoder is None:
        return
    settings = encoder.describe()
    for key in _ENCODER_KEYS[: 1 if bare else None]:  # dimension first: the plainest message for another model
        if key in settings and settings[key] != manifest[key]:
            raise ValueError(
                f"the index was built with {key} {manifest[key]!r} (encoder {manifest['encoder']!r}) "
                f"but encoder {settings['encoder']!r} has {settings[key]!r}; {fix}"
            )
