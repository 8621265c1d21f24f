"""An event loop whose clock moves only when nothing else is to be done: waits take no time and cannot be missed.

For code that waits on the loop alone. What another thread does is not waited for: to it, hours go by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Hourglass(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        look = self._selector.select

        def skip(timeout: float | None = None) -> Any:
            if timeout is None:
                return look(None)
            self._now += max(timeout, 0.0)
            return look(0)

        self._selector.select = skip

    def time(self) -> float:
        return self._now


def run(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run` does."""
    with asyncio.Runner(loop_factory=Hourglass) as runner:
        return runner.run(work)
