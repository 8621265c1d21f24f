"""APIFuture: a result that is on its way, for `.result()` and for `await` alike, and the loop that fetches it.

All network work of the process runs on one background event loop; what user code holds is an `APIFuture`. It is a
`concurrent.futures.Future`, so `as_completed` and `wait` take it too.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mint.doorbell import Doorbell

T = TypeVar("T")

LOOP_THREAD = "mint-client"

logger = logging.getLogger("mint")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_bell: Doorbell | None = None
_under_way: dict[asyncio.Task[Any], APIFuture[Any]] = {}  # the loop itself holds its tasks weakly
_kept: set[asyncio.Task[Any]] = set()
_failed: weakref.WeakSet[APIFuture[Any]] = weakref.WeakSet()


def _background() -> tuple[asyncio.AbstractEventLoop, Doorbell]:
    """The process's event loop, in a daemon thread, started on first use."""
    global _loop, _bell
    with _lock:
        if _loop is None or _bell is None:
            _loop = asyncio.new_event_loop()
            _bell = Doorbell(_loop)
            threading.Thread(target=_loop.run_forever, name=LOOP_THREAD, daemon=True).start()
            atexit.register(_tell_unasked, os.getpid())
        return _loop, _bell


def _forget_loop() -> None:
    global _loop, _bell, _lock
    _loop, _bell, _lock = None, None, threading.Lock()  # threads do not survive a fork, and the lock may have been held
    _under_way.clear()
    _kept.clear()


def _tell_unasked(pid: int) -> None:
    """At the end of the program, in one line, before a local server ends with it."""
    if os.getpid() != pid:
        return  # a forked child: the calls are its parent's
    failed = [future for future in list(_failed) if not future._seen]
    pending = [future for future in list(_under_way.values()) if not future._seen]
    if getattr(sys, "last_type", None) is not None:
        pending = []  # whoever ends by an exception has no time to wait for them
    told = [f"{count} failed ({why})" for why, count in Counter(future._failure() for future in failed).items()]
    told += [f"{len(pending)} are under way and may be lost"] if pending else []
    if told:
        logger.error(
            "the program ends and nobody has asked for the results of %d calls: %s. Take every result before the end, "
            "by .result() or await.",
            len(failed) + len(pending),
            "; ".join(told),
        )
    for future in [*failed, *list(_under_way.values())]:
        future._seen = True


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_loop)


class APIFuture(concurrent.futures.Future[T]):
    """The result of a call: block on it with `result`, or `await` it. A failure is raised there, each time."""

    def __init__(self, cancellable: bool = False, hurry: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._cancellable = cancellable
        self._hurry = hurry
        self._task: asyncio.Task[T] | None = None
        self._seen = False

    if not TYPE_CHECKING:  # a type checker knows what there is, and says so itself

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"a call on its way has no {name!r}: take its result first, by .result() or await.")

    def result(self, timeout: float | None = None) -> T:
        self._wanted()
        if not self.done() and threading.current_thread().name == LOOP_THREAD:
            raise RuntimeError("this would wait for ever: a callback of a future must not block on another one.")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wanted()
        return super().exception(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """`result` without blocking the caller's event loop. Running out of time leaves the call going."""
        # Once everybody who runs beside the caller has had a turn: they may be about to ask for the same kind of thing.
        asyncio.get_running_loop().call_soon(self._wanted)
        self._seen = True
        mirror = asyncio.wrap_future(self)
        if timeout is not None:
            done, _ = await asyncio.wait([mirror], timeout=timeout)
            if not done:
                raise TimeoutError(f"no result within {timeout} s")
        return await mirror

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> APIFuture[T]:
        """Itself: where the Tinker SDK wraps a `concurrent.futures.Future`, this is one."""
        return self

    def cancel(self) -> bool:
        """Gives up a sample and frees its place. Training calls run in order and cannot be taken back: False."""
        if not self._cancellable or not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        return True

    def _wanted(self) -> None:
        """Somebody waits for it."""
        self._seen = True
        if self._hurry is not None and not self.done():
            _background()[1].call(self._hurry)
        self._hurry = None

    def _settle(self, task: asyncio.Task[T]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        try:
            if error is None:
                self.set_result(task.result())
            else:
                self.set_exception(error)
                _failed.add(self)
        except concurrent.futures.InvalidStateError:
            pass  # cancelled meanwhile

    def _failure(self) -> str:
        error = super().exception()
        return f"{type(error).__name__}: {error}"

    def __del__(self) -> None:
        if self.done() and not self._seen and not self.cancelled() and super().exception() is not None:
            logger.error("a call failed and nobody asked for its result: %s", self._failure())


def start(
    work: Coroutine[Any, Any, T], *, cancellable: bool = False, hurry: Callable[[], None] | None = None
) -> APIFuture[T]:
    """Runs `work` on the background loop; calls of one thread begin in the order they are made. `hurry` is called there
    when somebody first waits for the result."""
    loop, bell = _background()
    future: APIFuture[T] = APIFuture(cancellable, hurry)

    def begin() -> None:
        if future.cancelled():
            work.close()
            return
        future._task = task = loop.create_task(work)
        _under_way[task] = future
        task.add_done_callback(future._settle)
        task.add_done_callback(_under_way.pop)

    bell.call(begin)
    return future


def keep(task: asyncio.Task[Any]) -> None:
    """On the background loop: it comes to its end though nobody waits for it. What it fails with is told elsewhere."""
    _kept.add(task)
    task.add_done_callback(_heard)


def _heard(task: asyncio.Task[Any]) -> None:
    _kept.discard(task)
    if not task.cancelled():
        task.exception()
