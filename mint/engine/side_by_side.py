"""Several passes of training at once on a CPU, a core each.

Better than several threads inside each product: nobody waits for a thread that the system has put aside, and since each
pass computes by itself, in its own order, its bits do not depend on how many others run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class SideBySide:
    def __init__(self, lanes: int) -> None:
        self._threads = ThreadPoolExecutor(max_workers=max(1, lanes - 1), thread_name_prefix="mint-training")

    def __call__(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """What the calls give, in their order; the caller's own thread makes the first. Returns, or raises, when all of
        them have ended."""
        others = [self._threads.submit(call) for call in calls[1:]]
        try:
            first = calls[0]()
        finally:
            wait(others)
        return [first, *(other.result() for other in others)]
