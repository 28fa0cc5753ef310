"""Resident memory of this process, from Linux's ``/proc``."""

from __future__ import annotations

import ctypes
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def resident_bytes(key: str) -> int:
    """This process's resident memory: ``VmRSS`` now, ``VmHWM`` at its peak since :func:`reset_peak` (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak() -> None:
    """Gives free memory back and begins the peak anew, so that one part's leftovers are not counted in the next."""
    _glibc("malloc_trim", 0)
    Path("/proc/self/clear_refs").write_text("5")


def return_freed_blocks() -> None:
    """From now on every tensor's memory goes back when it is freed, instead of being kept for the next."""
    _glibc("mallopt", _M_MMAP_THRESHOLD, 1 << 16)


def _glibc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:  # another C library keeps little
        function(*arguments)
