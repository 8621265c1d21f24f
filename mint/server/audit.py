"""The audit log: who did what, when, from where, with what result; one JSON object a line in the data folder.

Written by servers and by `mint keys`, appended to only, rotated by size. It holds names, ids and addresses; never a
key, a prompt or a sample. What may come in floods (failed sign-ins, refusals) is written once in a while, with a count.
"""

from __future__ import annotations

import contextvars
import fcntl
import getpass
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("mint.server")

FILE = "audit.jsonl"
LARGEST_BYTES = 16 << 20
KEPT = 8
"""Older files, audit.jsonl.1 being the youngest of them."""
FLOOD_SECONDS = 60.0
"""The least time between two lines that say the same."""
_FLOODS_KNOWN = 10_000

ADDRESS: contextvars.ContextVar[str | None] = contextvars.ContextVar("address", default=None)
"""Where the request at hand came from."""


class Audit:
    def __init__(self, data: Path, origin: str | None = None, largest_bytes: int = LARGEST_BYTES) -> None:
        """`origin` stands for an address, where there are no requests."""
        self._file = data / FILE
        self._origin = None if origin is None else f"{origin} by {_account()}"
        self._largest_bytes = largest_bytes
        self._floods: dict[tuple[str, str | None, str | None], tuple[float, int]] = {}

    def write(self, event: str, key: str | None, target: str | None = None, result: str = "ok", **more: Any) -> None:
        """`key` is the owner's id, `target` what was done to. A log that cannot be written stops no request."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now := time.time()))
            + f".{int(now % 1 * 1000):03d}Z",
            "event": event,
            "key": key,
            "from": self._origin or ADDRESS.get(),
            "target": target,
            "result": result,
            **more,
        }
        try:
            self._append((json.dumps(line) + "\n").encode())
        except OSError:
            log.exception("the audit log could not be written: %s", line)

    def write_some(self, event: str, key: str | None, result: str, **more: Any) -> None:
        """The first at once; then, while they keep coming, one a minute, which tells how many there were."""
        flood = (event, key or ADDRESS.get(), more.get("limit"))
        now = time.monotonic()
        since, count = self._floods.get(flood, (-FLOOD_SECONDS, 0))
        if now - since < FLOOD_SECONDS:
            self._floods[flood] = (since, count + 1)
            return
        if len(self._floods) >= _FLOODS_KNOWN:
            self._floods.clear()
        self._floods[flood] = (now, 0)
        self.write(event, key, result=result, unlogged_before=count, **more)

    def _append(self, line: bytes) -> None:
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # `mint keys` may come before any server
        while True:
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if not self._is_current(descriptor):
                    continue
                size = os.fstat(descriptor).st_size
                if size and size + len(line) > self._largest_bytes:
                    self._rotate()
                    continue
                os.write(descriptor, line)
                return
            finally:
                os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        """False if another process has rotated it away meanwhile."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        for n in range(KEPT - 1, 0, -1):
            older = self._file.with_name(f"{FILE}.{n}")
            if older.exists():
                older.replace(self._file.with_name(f"{FILE}.{n + 1}"))
        self._file.replace(self._file.with_name(f"{FILE}.1"))


def _account() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return str(os.getuid())
