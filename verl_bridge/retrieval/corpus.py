"""Documents on disk, read by position: the text never has to fit into memory."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Document:
    """One passage. In Search-R1's ``contents`` form the title is the first line as it stands, quotes included."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text as one passage, the string a document encoder reads."""
        return f"{self.title}\n{self.text}" if self.title and self.text else self.title or self.text


def _parse(line: bytes, where: str) -> Document:
    """One JSONL line as a document. Raises ValueError that names the line and the fix."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON object ({error}); write one object per line or drop the line") from None
    identifier = record.get("id") if isinstance(record, dict) else None
    if not isinstance(identifier, str | int) or isinstance(identifier, bool) or not str(identifier).strip():
        raise ValueError(f'{where}: no "id"; give every document a unique string or integer "id"')
    if isinstance(record.get("contents"), str):
        title, _, text = record["contents"].partition("\n")
    elif isinstance(record.get("text"), str):
        title, text = record.get("title") or "", record["text"]
    else:
        raise ValueError(
            f'{where}: neither "contents" nor "text"; '
            'use {"id", "contents": "title\\ntext"} or {"id", "title", "text"}'
        )
    if not isinstance(title, str) or not (title or text).strip():
        raise ValueError(f"{where}: the document is empty or its title is no string; fill it or drop the line")
    try:
        f"{identifier}{title}{text}".encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; tokenizers and files cannot hold it
        raise ValueError(f"{where}: not valid Unicode ({error.reason}); drop the broken \\uXXXX escape") from None
    return Document(str(identifier), title, text)


def _unpacked(path: Path, cache_dir: Path | None) -> Path:
    """The decompressed twin of a ``.gz`` file, named by the content of the archive, made once and atomically."""
    with path.open("rb") as file:
        key = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = (cache_dir or path.parent) / f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}-{key}.jsonl"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise ValueError(
            f"corpus {path} cannot be unpacked into {target.parent} ({error.strerror}); "
            "give a writable cache_dir or decompress the file yourself"
        ) from None
    try:
        with os.fdopen(handle, "wb") as out, gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, out, 1 << 20)
        os.replace(temporary, target)
    except (OSError, EOFError, zlib.error) as error:
        os.unlink(temporary)
        raise ValueError(f"corpus {path} is no complete gzip file ({error}); download or pack it again") from None
    return target


class Corpus:
    """A JSONL corpus with random access; documents are numbered by line, from 0.

    Only byte offsets stay in memory, and ids where they differ from the row numbers.

    Args:
        path: the (decompressed) file.
        offsets: byte offset of each document, and the file size as the last entry.
        rows: document id → row, None when every id is its own row number.
        sha256: digest of the decompressed bytes, which ties an index to its corpus.
    """

    def __init__(self, path: Path, offsets: array, rows: dict[str, int] | None, sha256: str) -> None:
        self.path = path
        self.sha256 = sha256
        self.size = offsets[-1]  # bytes
        self._offsets = offsets
        self._rows = rows
        self._file = path.open("rb")

    @classmethod
    def open(cls, path: str | os.PathLike, cache_dir: str | os.PathLike | None = None) -> Corpus:
        """Checks every line once and opens the file.

        Args:
            path: JSONL or JSONL.gz, lines ``{"id", "contents"}`` (Search-R1) or ``{"id", "title", "text"}``.
            cache_dir: where a ``.gz`` is unpacked, next to it by default.

        Raises:
            ValueError: missing or empty file, bad line (its number and the fix), an id used twice.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"corpus {path} does not exist; give the path of a JSONL or JSONL.gz file")
        name = str(path)
        if path.suffix == ".gz":
            path = _unpacked(path, None if cache_dir is None else Path(cache_dir))
        offsets, position, digest = array("q"), 0, hashlib.sha256()
        rows: dict[str, int] | None = None
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    document, row = _parse(line, f"corpus {name} line {number}"), len(offsets)
                    if rows is None and document.id != str(row):
                        rows = {str(known): known for known in range(row)}
                    if rows is not None and rows.setdefault(document.id, row) != row:
                        raise ValueError(
                            f"corpus {name} line {number}: id {document.id!r} was used before (document "
                            f"{rows[document.id]} counted from 0); make ids unique"
                        )
                    offsets.append(position)
                position += len(line)
        if not offsets:
            raise ValueError(f"corpus {name} holds no documents; check that it is the right file")
        offsets.append(position)
        return cls(path, offsets, rows, digest.hexdigest())

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Document:
        """The document in a row. Raises IndexError outside ``0 <= row < len``: row −1 is never the last document."""
        if not 0 <= row < len(self):
            raise IndexError(f"document row {row} is outside the corpus of {len(self)} documents")
        start = self._offsets[row]
        # pread keeps no file position, so that several threads may read
        line = os.pread(self._file.fileno(), self._offsets[row + 1] - start, start)
        return _parse(line.strip(), f"corpus {self.path} byte {start}")

    def __iter__(self) -> Iterator[Document]:
        return (self[row] for row in range(len(self)))

    def row(self, document_id: str) -> int:
        """The row of a document. Raises KeyError for an unknown id."""
        if self._rows is not None:
            row = self._rows.get(document_id, -1)
        else:
            row = int(document_id) if document_id.isascii() and document_id.isdecimal() else -1
            row = row if str(row) == document_id and row < len(self) else -1
        if row < 0:
            raise KeyError(f"document id {document_id!r} is not in corpus {self.path}")
        return row

    def by_id(self, document_id: str) -> Document:
        """The document with an id. Raises KeyError for an unknown one."""
        return self[self.row(document_id)]
