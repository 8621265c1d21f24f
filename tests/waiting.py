"""Waiting for what another thread or process will do, without guessing how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 60.0


def eventually(condition: Callable[[], T]) -> T:
    """What the condition gives once that is true; patience costs nothing where things go well."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)
    return value


def is_gone(pid: int) -> bool:
    """Whether a process has ended, collected by its parent or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
