"""Files and folders that appear under their final name only when complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def cache_dir() -> Path:
    """``$VERL_BRIDGE_CACHE``, or ``verl_bridge`` in the user's cache folder."""
    root = os.environ.get("VERL_BRIDGE_CACHE")
    if root:
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "verl_bridge"


@contextmanager
def named(final: Path) -> Iterator[None]:
    """The operating system names a parent or a temporary file; whoever asked knows only ``final``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{final} cannot be written ({reason}); choose another place") from error


def put_folder(folder: Path, final: Path) -> None:
    """Gives a complete folder its final name, beside it, replacing a folder that was there."""
    if final.is_dir():
        # a folder cannot be replaced in one call: the old one steps aside, so that no moment loses both
        old = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.old-"))
        os.replace(final, old)
        os.replace(folder, final)
        shutil.rmtree(old)
    else:
        os.replace(folder, final)


@contextmanager
def new_folder(final: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder next to ``final`` that takes its name at the end, replacing what was there.

    When the body raises, the temporary folder goes and ``final`` is left as it was.
    """
    final = Path(final)
    with named(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.new-"))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes it private
        with named(final):
            put_folder(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def new_file(final: str | os.PathLike) -> Iterator[IO[str]]:
    """A UTF-8 text file to write that takes its name at the end, replacing what was there; missing folders are made.

    When the body raises, the temporary file goes and ``final`` is left as it was.
    """
    final = Path(final)
    with named(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=final.parent, prefix=f".{final.name}.new-", delete=False
        )
    with file:
        try:
            yield file
            file.flush()
            os.chmod(file.name, 0o644)  # temporary files are private
            with named(final):
                os.replace(file.name, final)
        except BaseException:
            os.unlink(file.name)
            raise
