"""Hands one model's requests on in the order of their sequence numbers, however they arrive.

Handing on means submitting to the backend, which runs one adapter's work in the order it was submitted; so nothing here
waits for a result. Parallel chunks of one call arrive first chunk last, and numbers can be missing for good: a request
that failed on the client, or was refused, is never sent again under its number.

The order is a function of the calls made here and of nothing else, so that it is the same when a journal repeats them:
the end of the wait for a missing number is one of these calls (`jump`), made by whoever `on_gap` tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from mint.server.intervals import Intervals


class Sequencer:
    def __init__(
        self,
        gap_seconds: float,
        on_gap: Callable[[int], None] | None = None,
        following: int = 1,
        handled: Iterable[Iterable[int]] = (),
    ) -> None:
        """`on_gap` hears the first number that waits, when those before it have been waited for long enough.
        `following` and `handled` (its runs) are those of an earlier sequencer that this one continues."""
        self._gap_seconds = gap_seconds
        self.on_gap = on_gap or self.jump
        self.following = following
        """The number whose turn is next."""
        self.handled = Intervals(handled)
        """Numbers that were handed on, or refused."""
        self._waiting: dict[int, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def seen(self, number: int) -> bool:
        """Whether a request of this number was handed in, or refused, before."""
        return number in self._waiting or number in self.handled

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def first_waiting(self) -> int | None:
        return min(self._waiting, default=None)

    def submit(self, number: int | None, start: Callable[[], None]) -> None:
        """Calls `start` when its turn comes; without a number, or late for its turn, at once."""
        if number is None:
            start()
        elif number < self.following:
            self.handled.add(number)
            start()
        else:
            self._waiting[number] = start
            self._advance()

    def skip(self, number: int) -> None:
        """This number was refused and will not come again."""
        if not self.seen(number):
            self.submit(number, _nothing)

    def jump(self, number: int) -> None:
        """Gives up on the numbers before this one."""
        self.following = max(number, self.following)
        self._advance()

    def close(self) -> None:
        """Waits for nothing any more."""
        while self._waiting:
            self.jump(min(self._waiting))

    def _advance(self) -> None:
        before = self.following
        while start := self._waiting.pop(self.following, None):
            self.handled.add(self.following)
            self.following += 1
            start()
        if self._timer is not None and (self.following != before or not self._waiting):
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._timer is None:  # not anew at each arrival: a steady stream would put it off for ever
            self._timer = asyncio.get_running_loop().call_later(self._gap_seconds, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self._waiting:
            self.on_gap(min(self._waiting))


def _nothing() -> None:
    return
