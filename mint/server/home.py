"""The folder of journals that belongs to one server: several can share a data folder, each by the port it serves.

A server that is started again on the same data and port finds what the last one left. One on a port of the system's
choice can never be found again by its clients, so its folder goes when it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from pathlib import Path

from mint.errors import Busy

_PASSING = "run-"
_LOCK = "lock"
_HANDOVER_SECONDS = 10.0
"""How long a server that is about to end may keep its successor waiting."""


class Home:
    def __init__(self, root: Path, port: int) -> None:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f"{_PASSING}*"):
            if (lock := _try_lock(left)) is not None:  # its server did not get to remove it
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        self._passing = port == 0
        self.folder = root / (f"{_PASSING}{uuid.uuid4().hex[:12]}" if self._passing else str(port))
        self._lock = _lock(self.folder)
        self.models = self.folder / "models"
        self.snapshots = self.folder / "snapshots"
        try:
            for folder in (self.models, self.snapshots):
                folder.mkdir(exist_ok=True)
        except OSError:
            os.close(self._lock)
            raise

    def close(self) -> None:
        if self._passing:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _lock(folder: Path) -> int:
    folder.mkdir(exist_ok=True)
    deadline = time.monotonic() + _HANDOVER_SECONDS
    while (lock := _try_lock(folder)) is None:
        if time.monotonic() > deadline:
            raise Busy(f"another server has {folder}; end it first, or choose another port or data folder.")
        time.sleep(0.1)
    return lock


def _try_lock(folder: Path) -> int | None:
    """An open file that holds the folder's lock, until it is closed or the process ends in any way."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # removed in the meantime
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
