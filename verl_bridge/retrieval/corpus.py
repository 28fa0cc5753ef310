"""Documents on disk, read by position: the text never has to fit into memory.

A large file is parsed once: where its documents start, its digest and the look-up of ids are kept in the cache folder.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import shutil
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_bridge.files import cache_dir as default_cache_dir
from verl_bridge.files import new_file, new_folder
from verl_bridge.files import sha256 as sha256_of

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

CACHED_FROM = 1 << 20  # bytes; a smaller corpus is parsed as fast as a cache is read


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
    import orjson

    try:
        record = orjson.loads(line)
        plain = isinstance(record, dict) and not isinstance(record.get("id"), float)
    except ValueError:
        plain = False
    if not plain:
        # What orjson refuses, the standard library may take (NaN, a byte order mark), or it says why not; and orjson
        # reads integers beyond 64 bits as floats.
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: not a JSON object ({error}); write one object per line or drop the line"
            ) from None
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
        raise ValueError(f"{where}: the document is empty or its title is not a string; fill it or drop the line")
    if not plain:
        try:
            f"{identifier}{title}{text}".encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; tokenizers and files cannot hold it
            raise ValueError(f"{where}: not valid Unicode ({error.reason}); drop the broken \\uXXXX escape") from None
    return Document(str(identifier), title, text)


def _digest(identifier: str) -> int:
    """64 bits of an id: the look-up keeps these instead of millions of strings."""
    return int.from_bytes(
        hashlib.blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


def _unpacked(path: Path, cache_dir: Path | None) -> Path:
    """The decompressed twin of a ``.gz`` file, named by the content of the archive, made once and atomically."""
    key = sha256_of(path)[:16]
    beside = path.parent if os.access(path.parent, os.W_OK) else default_cache_dir()
    target = (cache_dir or beside) / f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}-{key}.jsonl"
    if not target.exists():
        unpack(path, target)
    return target


def unpack(path: Path, target: Path) -> None:
    """Decompresses the corpus ``path`` (.gz) into the file ``target``, which appears when complete.

    Raises:
        ValueError: it is not a complete gzip file, or there is no room; names the fix.
    """
    try:
        with new_file(target, "wb") as out, gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:  # the first is an OSError too
        raise ValueError(f"corpus {path} is not a complete gzip file ({error}); download or pack it again") from None
    except OSError as error:
        raise ValueError(
            f"corpus {path} cannot be unpacked into {target.parent} ({error.strerror or error}); make room there, or "
            "unpack it yourself and give the JSONL file"
        ) from None


class Corpus:
    """A JSONL corpus with random access; documents are numbered by line, from 0.

    Only byte offsets stay in memory, and 64-bit digests of ids where they differ from the row numbers.

    Args:
        path: the (decompressed) file.
        offsets: byte offset of each document, and the file size as the last entry.
        lookup: digests of the ids, ascending, and the row of each; None when every id is its own row number.
        sha256: digest of the decompressed bytes, which ties an index to its corpus.
    """

    def __init__(
        self, path: Path, offsets: np.ndarray, lookup: tuple[np.ndarray, np.ndarray] | None, sha256: str
    ) -> None:
        self.path = path
        self.sha256 = sha256
        self.size = int(offsets[-1])  # bytes
        self._offsets = offsets  # (documents + 1)
        self._lookup = lookup  # (documents), (documents)
        self._file = path.open("rb")

    @classmethod
    def open(cls, path: str | os.PathLike, cache_dir: str | os.PathLike | None = None) -> Corpus:
        """Checks every line, the first time that a large file is seen, and opens it.

        Args:
            path: JSONL or JSONL.gz, lines ``{"id", "contents"}`` (Search-R1) or ``{"id", "title", "text"}``.
            cache_dir: where a ``.gz`` is unpacked (default: next to it) and what was parsed is kept (default:
                ``$VERL_BRIDGE_CACHE``, or ``~/.cache/verl_bridge``).

        Raises:
            ValueError: missing or empty file, bad line (its number and the fix), an id used twice.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"corpus {path} does not exist; give the path of a JSONL or JSONL.gz file")
        name, folder = str(path), None if cache_dir is None else Path(cache_dir)
        if path.suffix == ".gz":
            path = _unpacked(path, folder)
        cache = (folder or default_cache_dir()) / f"corpus-{_digest(str(path.resolve())):016x}"
        state = _state(path)
        corpus = cls._from_cache(path, cache, state)
        if corpus is None:
            corpus = cls._parsed(path, name)
            if corpus.size >= CACHED_FROM and _state(path) == state:
                corpus._keep(cache, state)
        return corpus

    @classmethod
    def _parsed(cls, path: Path, name: str) -> Corpus:
        """Reads the whole file; ``name`` is what the user calls it."""
        import numpy as np

        starts, digests, position, sha256, by_row = array("q"), array("Q"), 0, hashlib.sha256(), True
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                sha256.update(line)
                if line.strip():
                    identifier = _parse(line, f"corpus {name} line {number}").id
                    if by_row and identifier != str(len(starts)):
                        by_row, digests = False, array("Q", (_digest(str(row)) for row in range(len(starts))))
                    if not by_row:
                        digests.append(_digest(identifier))
                    starts.append(position)
                position += len(line)
        if not starts:
            raise ValueError(f"corpus {name} holds no documents; check that it is the right file")
        starts.append(position)
        lookup = None
        if not by_row:
            unsorted = np.frombuffer(digests, dtype=np.uint64)
            rows = unsorted.argsort(kind="stable")
            lookup = unsorted[rows], rows
        corpus = cls(path, np.frombuffer(starts, dtype=np.int64), lookup, sha256.hexdigest())
        corpus._refuse_repeated_ids(name)
        return corpus

    def _refuse_repeated_ids(self, name: str) -> None:
        import numpy as np

        if self._lookup is None:
            return
        digests, rows = self._lookup
        suspects = np.flatnonzero(digests[1:] == digests[:-1]) + 1  # equal digests are nearly always equal ids
        for place in suspects[rows[suspects].argsort()].tolist():
            row, first = int(rows[place]), int(digests.searchsorted(digests[place]))
            identifier = self[row].id
            earlier = [int(other) for other in rows[first:place] if self[int(other)].id == identifier]
            if earlier:
                raise ValueError(
                    f"corpus {name} line {self._line(row)}: id {identifier!r} was used before (document "
                    f"{earlier[0]} counted from 0); make ids unique"
                )

    def _line(self, row: int) -> int:
        """The line number of a document, for messages: blank lines count."""
        position = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if position == self._offsets[row]:
                    return number
                position += len(line)
        raise ValueError(f"corpus {self.path} changed while it was read; open it again")

    @classmethod
    def _from_cache(cls, path: Path, folder: Path, state: list[Any]) -> Corpus | None:
        """What :meth:`_keep` wrote for this state of the file; None when there is nothing or it is damaged."""
        import numpy as np

        try:
            about = json.loads((folder / "corpus.json").read_bytes())
            arrays = {}
            if about["state"] != state:
                return None
            for file, checksum in about["arrays"].items():
                arrays[file] = np.load(folder / file, mmap_mode="r", allow_pickle=False)
                if hashlib.blake2b(arrays[file]).hexdigest() != checksum:
                    return None
            lookup = (arrays["digests.npy"], arrays["rows.npy"]) if len(arrays) == 3 else None
            return cls(path, arrays["offsets.npy"], lookup, about["sha256"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def _keep(self, folder: Path, state: list[Any]) -> None:
        """Writes the cache; without a place for it the next open parses again."""
        import numpy as np

        arrays: dict[str, Any] = {"offsets.npy": self._offsets}
        if self._lookup is not None:
            arrays["digests.npy"], arrays["rows.npy"] = self._lookup
        try:
            with new_folder(folder) as new:
                for file, array_ in arrays.items():
                    np.save(new / file, array_, allow_pickle=False)
                checksums = {file: hashlib.blake2b(array_).hexdigest() for file, array_ in arrays.items()}
                about = {"state": state, "sha256": self.sha256, "arrays": checksums}
                (new / "corpus.json").write_text(json.dumps(about))
        except OSError as error:  # read-only or full
            if self._from_cache(self.path, folder, state) is not None:
                return  # another process was first
            logger.warning(
                "what was read of corpus %s cannot be kept in %s (%s): the next start parses it again; make room there "
                "or set VERL_BRIDGE_CACHE to another folder",
                *(self.path, folder, error),
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Document:
        """The document in a row. Raises IndexError outside ``0 <= row < len``: row −1 is never the last document."""
        if not 0 <= row < len(self):
            raise IndexError(f"document row {row} is outside the corpus of {len(self)} documents")
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        # pread keeps no file position, so that several threads may read
        line = os.pread(self._file.fileno(), end - start, start)
        return _parse(line.strip(), f"corpus {self.path} byte {start}")

    def __iter__(self) -> Iterator[Document]:
        return (self[row] for row in range(len(self)))

    def row(self, document_id: str) -> int:
        """The row of a document. Raises KeyError for an unknown id."""
        if self._lookup is None:
            row = (
                int(document_id) if len(document_id) < 20 and document_id.isascii() and document_id.isdecimal() else -1
            )
            if str(row) == document_id and 0 <= row < len(self):
                return row
        else:
            digests, rows = self._lookup
            digest = _digest(document_id)
            place = int(digests.searchsorted(digests.dtype.type(digest)))
            while place < len(digests) and digests[place] == digest:
                if self[int(rows[place])].id == document_id:  # other ids may share the digest
                    return int(rows[place])
                place += 1
        raise KeyError(f"document id {document_id!r} is not in corpus {self.path}")

    def by_id(self, document_id: str) -> Document:
        """The document with an id. Raises KeyError for an unknown one."""
        return self[self.row(document_id)]


def _state(path: Path) -> list[Any]:
    """Changes whenever the file does: also a write that keeps size and modification time moves its change time."""
    state = path.stat()
    return [str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns]
