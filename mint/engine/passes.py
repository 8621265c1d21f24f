"""Threads on which training computes beside the worker: tenants train side by side, and while others sample.

For CPUs, and for models that compute in one thread: those that take all cores, and a GPU, do one thing after another
on the worker. Each pass is one tenant's alone, so its bits do not depend on what runs beside it. Most of a pass is
arithmetic, during which torch lets other threads have Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from mint.engine.lanes import Steps
from mint.engine.token_budget import ACTIVATION_BYTES
from mint.machine import free_memory

T = TypeVar("T")


class Passes:
    def __init__(self, allowed: Callable[[], bool], threads: int | None = None) -> None:
        """`allowed`, asked on the worker before each piece, says whether it may run beside the worker; `threads`: how
        many may, by default one for each core, if there is memory for their activations."""
        self._allowed = allowed
        self.threads = _cores_with_memory() if threads is None else threads
        self._pool = ThreadPoolExecutor(max_workers=max(1, self.threads), thread_name_prefix="mint-pass")

    def run(self, steps: Generator[None, None, T]) -> Steps:
        """Long work in pieces, for the lane of a task."""
        while True:
            finished, result = yield from self.call(partial(_advance, steps))
            if finished:
                return result
            yield None

    def call(self, work: Callable[[], T]) -> Steps:
        """Beside the worker if it may be: then the worker is free meanwhile, and the task's lane waits."""
        if self.threads < 2 or not self._allowed():
            return work()
        piece = self._pool.submit(work)
        yield piece
        return piece.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _advance(steps: Generator[None, None, T]) -> tuple[bool, T | None]:
    """Does one piece; whether that was the last, and then what came out."""
    try:
        next(steps)
    except StopIteration as stop:
        return True, stop.value
    return False, None


def _cores_with_memory() -> int:
    """With a single core there is nothing beside the worker."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, free_memory() // (2 * ACTIVATION_BYTES["cpu"]))
