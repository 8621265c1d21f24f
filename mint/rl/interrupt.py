"""Ctrl-C as a request: the loop finishes what cannot be left half done, saves, and says how to go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """Raised where the loop may stop, once asked to."""


class StopRequest:
    """While entered, the first Ctrl-C asks the task that entered to stop, and the second stops it at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> StopRequest:
        self._task = asyncio.current_task()
        # Only a main thread on a system with signals has them; elsewhere Ctrl-C stays what it was.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        if kind is asyncio.CancelledError and self.asked.is_set():
            raise KeyboardInterrupt from error

    def ask(self) -> None:
        if self.asked.is_set() and self._task is not None:
            self._task.cancel()
        else:
            logger.warning("Stopping at the next safe point and saving; Ctrl-C again stops at once.")
        self.asked.set()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or `Interrupted` as soon as a stop is asked for; then `work` is cancelled."""
        task, waiter = asyncio.create_task(work), asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if self.asked.is_set():
                raise Interrupted
            return task.result()
        finally:
            task.cancel()
            waiter.cancel()
