"""After the engine died: the requests that may have killed it are carried out first, one at a time, alone.

So that a request that kills every engine is told from those that happened to run beside it. While a trial is on,
everything else waits; it takes as long as the requests under suspicion take.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

DEATHS_ALONE = 2
"""A request during which the engine died this often while nothing else ran is not carried out again."""


class Trial:
    def __init__(self) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._others: list[Callable[[], None]] = []
        self._calm = asyncio.Event()
        self._calm.set()

    @property
    def calm(self) -> bool:
        return not self._line

    async def wait_until_calm(self) -> None:
        await self._calm.wait()

    def admits(self, pump: Callable[[], None]) -> bool:
        """Whether it may go on now; if not, `pump` is called when it may."""
        if not self._line or self._line[0] == pump:
            return True
        if pump not in self._others and pump not in self._line:
            self._others.append(pump)
        return False

    def on(self, pump: Callable[[], None]) -> bool:
        return bool(self._line) and self._line[0] == pump

    def join(self, pump: Callable[[], None]) -> None:
        if pump not in self._line:
            self._line.append(pump)
            self._calm.clear()

    def leave(self, pump: Callable[[], None]) -> None:
        if pump not in self._line:
            return
        self._line.remove(pump)
        if self._line:
            self._line[0]()
            return
        self._calm.set()
        others, self._others = self._others, []
        for waiting in others:
            waiting()
