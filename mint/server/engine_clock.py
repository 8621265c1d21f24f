"""Who has the engine: its time, shared out among those who have work in it.

Every second in which the engine has work is divided equally among the parties (an owner's run) that have any in it, so
that the shares add up to the time it was busy, however many requests each of them queued.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Party = tuple[str, str]


class EngineClock:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._share = 0.0  # of one party that has been there all the time
        self._read = clock()
        self._requests: dict[Party, int] = {}
        self._charged: dict[Party, float] = {}

    def begin(self, party: Party) -> None:
        with self._lock:
            self._advance()
            if party not in self._requests:
                self._charged[party] = self._share
            self._requests[party] = self._requests.get(party, 0) + 1

    def end(self, party: Party) -> float:
        """The party's seconds since they were last told."""
        with self._lock:
            self._advance()
            seconds = self._share - self._charged[party]
            self._charged[party] = self._share
            self._requests[party] -= 1
            if not self._requests[party]:
                del self._requests[party], self._charged[party]
            return seconds

    def _advance(self) -> None:
        now = self._clock()
        if self._requests:
            self._share += (now - self._read) / len(self._requests)
        self._read = now
