"""Folders that are written whole or not at all, and know when they are damaged.

A folder is prepared beside its destination, flushed to disk, then swapped into place; a crash at any point leaves the
old one or the new one. What the files mean is not known here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(folder: Path, flush: bool = True) -> Iterator[Path]:
    """Gives an empty folder to fill; when the block ends well, it takes the place of `folder`. Without `flush` that is
    safe from the end of this process, not of the machine."""
    fresh = folder.with_name(f".{folder.name}.new")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)  # left by a crash
    fresh.mkdir()
    try:
        yield fresh
        for path in (*fresh.iterdir(), fresh) if flush else ():
            _flush(path)
        _swap_in(fresh, folder)
        if flush:
            _flush(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undoes a swap that a crash cut in two, which can only happen where folders cannot be exchanged in one move."""
    aside = _aside(folder)
    if aside.exists() and not folder.exists():
        os.rename(aside, folder)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _swap_in(fresh: Path, folder: Path) -> None:
    recover(folder)
    if not folder.exists():
        os.rename(fresh, folder)
    elif not _exchange(fresh, folder):  # else `fresh` holds the old one now
        aside = _aside(folder)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        os.rename(fresh, folder)
        shutil.rmtree(aside, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders in one move where the system can (Linux's renameat2); False where it cannot."""
    if sys.platform != "linux":
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
