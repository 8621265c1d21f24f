"""Lines of JSON read as they are written: each call parses only the bytes that are new."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
MOST_NOTED = 20
"""Broken lines remembered of one file."""


@dataclass(frozen=True)
class BrokenLine:
    """A whole line that is not a JSON object."""

    file: str
    line: int
    why: str


class JsonlTail:
    """One file, followed. A file that was replaced or cut short, as on resume, is read again from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken: list[BrokenLine] = []
        self._offset = 0
        self._inode: int | None = None
        self._lines = 0

    @property
    def changed(self) -> bool:
        """Whether `read` would find something; costs one stat."""
        try:
            found = self.path.stat()
        except OSError:
            return self._inode is not None
        return found.st_ino != self._inode or found.st_size != self._offset

    def read(self) -> tuple[bool, list[Json]]:
        """Whether it began anew, so that what was read before is void; and the new whole lines."""
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                anew = self._inode is not None and (found.st_ino != self._inode or found.st_size < self._offset)
                if anew:
                    self._begin()
                self._inode = found.st_ino
                file.seek(self._offset)
                new = file.read()
        except OSError:
            anew = self._inode is not None
            self._begin()
            return anew, []
        whole = new[: new.rfind(b"\n") + 1]  # what follows the last newline is still being written
        self._offset += len(whole)
        return anew, list(self._parse(whole))

    def _begin(self) -> None:
        self._offset, self._inode, self._lines, self.broken = 0, None, 0, []

    def _parse(self, whole: bytes) -> Iterator[Json]:
        for line in whole.split(b"\n")[:-1]:
            self._lines += 1
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"an object was expected, this is {type(record).__name__}")
            except ValueError as error:
                if len(self.broken) < MOST_NOTED:
                    self.broken.append(BrokenLine(self.path.name, self._lines, str(error)))
                continue
            yield record
