"""Whole messages between two processes: several in one write, and as many from one read as have come.

Each read and write is a chance for another thread to take Python away, so they are made as few as they can be. Imports
nothing but the standard library, so that a process can be started before anything else is there.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

_PIECE = 1 << 18
"""Bytes that are read at a time."""
_HEAD = 8
"""Bytes of a length."""


class Pipe:
    """One end of a connected pair. Several threads may send if they take turns; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._come = bytearray()

    def send(self, messages: Sequence[bytes]) -> None:
        self._end.sendall(b"".join(part for m in messages for part in (len(m).to_bytes(_HEAD, "big"), m)))

    def receive(self) -> list[bytes]:
        """The messages that are there, at least one; `EOFError` when the other end is closed."""
        while not (whole := self._take()):
            piece = self._end.recv(_PIECE)
            if not piece:
                raise EOFError("the other end is closed")
            self._come += piece
        return whole

    def close(self) -> None:
        self._end.close()

    def _take(self) -> list[bytes]:
        come, start, whole = self._come, 0, []
        while len(come) >= start + _HEAD:
            end = start + _HEAD + int.from_bytes(come[start : start + _HEAD], "big")
            if len(come) < end:
                break
            whole.append(bytes(come[start + _HEAD : end]))
            start = end
        del come[:start]
        return whole
