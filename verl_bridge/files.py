"""Files and folders that appear under their final name only when complete."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

YOUNG = 60.0  # seconds in which a temporary folder may be between being made and being locked


def cache_dir() -> Path:
    """``$VERL_BRIDGE_CACHE``, or ``verl_bridge`` in the user's cache folder."""
    root = os.environ.get("VERL_BRIDGE_CACHE")
    if root:
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "verl_bridge"


def sha256(file: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes, in hexadecimal digits."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def named(final: Path) -> Iterator[None]:
    """The operating system names a parent or a temporary file; whoever asked knows only ``final``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"{final} cannot be written ({reason}); choose another place") from error


def put_folder(folder: Path, final: Path, *, keep_existing: bool = False) -> None:
    """Gives a complete folder its final name, beside it, replacing a folder that was there.

    What writers that were killed have left beside it goes, too. When it fails, ``final`` is as it was.

    Args:
        folder: the complete folder.
        final: its name from now on.
        keep_existing: deletes ``folder`` instead where ``final`` holds something.
    """
    if final.is_dir() and not keep_existing:
        # a folder cannot be replaced in one call: the old one steps aside, so that no moment loses both
        old = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.old-"))
        with _in_use(final):
            os.replace(final, old)
            try:
                os.replace(folder, final)
            except BaseException:  # an interrupt, too
                with suppress(OSError):  # the new one is there already
                    os.replace(old, final)
                raise
            shutil.rmtree(old)
    else:
        try:
            os.replace(folder, final)
        except OSError:
            if not (keep_existing and final.is_dir()):
                raise
            shutil.rmtree(folder)
    for kind in ("new", "old"):
        for left in final.parent.glob(f".{glob.escape(final.name)}.{kind}-*"):
            with suppress(OSError):  # somebody uses it, it has just gone, or there are no locks on this file system
                _sweep(left)


@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Within it nobody sweeps the folder, not under another name either. A process that is killed lets go."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # where there are no locks, nothing is swept
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _sweep(folder: Path) -> None:
    """Deletes a temporary folder. Raises OSError when it is in use or not a folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if time.time() - os.fstat(handle).st_mtime > YOUNG:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


@contextmanager
def new_folder(final: str | os.PathLike, *, keep_existing: bool = False) -> Iterator[Path]:
    """A temporary folder next to ``final`` that takes its name at the end, replacing what was there.

    When the body raises, the temporary folder goes and ``final`` is left as it was.

    Args:
        final: the name.
        keep_existing: a folder that is there by then stays instead: somebody else was first, and made the same.
    """
    final = Path(final)
    with named(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.new-"))
    try:
        with _in_use(temporary):
            yield temporary
            temporary.chmod(0o755)  # mkdtemp makes it private
            with named(final):
                put_folder(temporary, final, keep_existing=keep_existing)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def new_file(final: str | os.PathLike, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """A file to write that takes its name at the end, replacing what was there; missing folders are made.

    When the body raises, the temporary file goes and ``final`` is left as it was.

    Args:
        final: the name.
        mode: ``w`` for UTF-8 text, ``wb`` for bytes.
    """
    final = Path(final)
    with named(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        encoding = "utf-8" if mode == "w" else None
        file = tempfile.NamedTemporaryFile(
            mode, encoding=encoding, dir=final.parent, prefix=f".{final.name}.new-", delete=False
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
