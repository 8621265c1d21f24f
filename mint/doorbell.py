"""`Doorbell`: brings calls from other threads to an event loop, which is woken once for all that come before it looks.

asyncio writes to a socket each time it is called from another thread, which costs more than most of what is called.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Doorbell:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    def call(self, call: Callable[[], None]) -> None:
        """From any thread: makes the call on the loop, after those that came before. Nobody hears it if the loop is
        closed."""
        with self._lock:
            self._calls.append(call)
            if len(self._calls) > 1 or self._loop.is_closed():
                return
        self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            self._loop.call_soon(call)  # rather than at once, so that one that fails is its own affair


# Each lives as long as somebody's work is on its way; a bell knows its loop, so that keeping bells would keep loops.
_bells: WeakValueDictionary[asyncio.AbstractEventLoop, Doorbell] = WeakValueDictionary()


def arriving(work: Future[T]) -> asyncio.Future[T]:
    """The outcome of work done elsewhere, on the running loop; cancelling it cancels the work. What
    `asyncio.wrap_future` gives, with the loop woken once for many."""
    loop = asyncio.get_running_loop()
    bell = _bells.get(loop) or _bells.setdefault(loop, Doorbell(loop))
    arrived: asyncio.Future[T] = loop.create_future()

    def settle() -> None:
        if arrived.done():
            return
        if work.cancelled():
            arrived.cancel()
        elif (error := work.exception()) is not None:
            arrived.set_exception(error)
        else:
            arrived.set_result(work.result())

    arrived.add_done_callback(lambda done: work.cancel() if done.cancelled() else None)
    work.add_done_callback(lambda _: bell.call(settle))
    return arrived
