"""Hands one model's requests on in the order of their sequence numbers, however they arrive.

Handing on means submitting to the backend, which runs one adapter's work in the order it was submitted; so nothing here
waits for a result. Parallel chunks of one call arrive first chunk last, and numbers can be missing for good: a request
that failed on the client, or was refused, is never sent again under its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Sequencer:
    def __init__(self, gap_seconds: float) -> None:
        self._gap_seconds = gap_seconds
        self._next = 1
        self._waiting: dict[int, Callable[[], None]] = {}
        self._unnumbered: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._open = False
        self._timer: asyncio.TimerHandle | None = None

    def seen(self, number: int) -> bool:
        """Whether a request of this number was handed in before."""
        return number in self._seen

    def open(self) -> None:
        """Until the model exists, its requests wait here."""
        self._open = True
        for start in self._unnumbered:
            start()
        self._unnumbered.clear()
        self._advance()

    def submit(self, number: int | None, start: Callable[[], None]) -> None:
        """Calls `start` when its turn comes; without a number, or late for its turn, at once."""
        if number is not None:
            self._seen.add(number)
        if number is not None and number >= self._next:
            self._waiting[number] = start
            self._advance()
        elif self._open:
            start()
        else:
            self._unnumbered.append(start)

    def skip(self, number: int | None) -> None:
        """This number was refused and will not come again."""
        if number is not None and number >= self._next and number not in self._waiting:
            self._waiting[number] = _nothing
            self._advance()

    def _advance(self) -> None:
        if not self._open:
            return
        before = self._next
        while start := self._waiting.pop(self._next, None):
            self._next += 1
            start()
        if self._timer is not None and (self._next != before or not self._waiting):
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._timer is None:  # not anew at each arrival: a steady stream would put it off for ever
            self._timer = asyncio.get_running_loop().call_later(self._gap_seconds, self._jump)

    def _jump(self) -> None:
        """Gives up on the numbers before the first one waiting."""
        self._timer = None
        self._next = min(self._waiting, default=self._next)
        self._advance()


def _nothing() -> None:
    return
