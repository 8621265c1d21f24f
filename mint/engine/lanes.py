"""Tasks in order within a lane, by turns between lanes.

An adapter's or a policy's work is one lane. A long task is a generator that pauses after each piece; one that pauses
with a `Future` waits for it, and its lane with it. Knows nothing of models; runs on whoever calls `step`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any

from mint.engine.faults import as_mint_error
from mint.errors import MintError

Steps = Generator[Future[Any] | None, None, Any]


class Task:
    """Something to do, and the future that hears of its end."""

    def __init__(self, future: Future[Any], work: Callable[[], Any], quick: bool) -> None:
        """`work` returns the result, or a generator that does. `quick`: it takes no time worth speaking of."""
        self.future = future
        self.quick = quick
        self._work = work
        self._steps: Steps | None = None
        self._started = False

    def advance(self) -> tuple[bool, Future[Any] | None]:
        """Does one piece; whether that was the last, and what to wait for before the next."""
        if not self._started and not self.future.set_running_or_notify_cancel():
            return True, None
        self._started = True
        try:
            if self._steps is None:
                result = self._work()
                if not isinstance(result, Generator):
                    self.future.set_result(result)
                    return True, None
                self._steps = result
            return False, next(self._steps)
        except StopIteration as stop:
            self.future.set_result(stop.value)
        except Exception as error:
            self.future.set_exception(as_mint_error(error))
        return True, None

    def fail(self, error: MintError) -> None:
        if self._started or self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Lanes:
    def __init__(self, call_soon: Callable[[Callable[[], None]], None]) -> None:
        """`call_soon` brings a call from any thread to the one that steps."""
        self._call_soon = call_soon
        self._ready: OrderedDict[str, deque[Task]] = OrderedDict()  # the next in turn first
        self._had_turn: dict[str, deque[Task]] = {}  # ready, but behind whoever comes before the next step
        self._waiting: dict[str, deque[Task]] = {}

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: lanes that wait do not count."""
        return bool(self._ready or self._had_turn)

    def __len__(self) -> int:
        return sum(len(tasks) for lanes in self._all() for tasks in lanes.values())

    def add(self, lane: str, task: Task) -> None:
        tasks = self._waiting.get(lane) or self._had_turn.get(lane)
        if tasks is None:
            tasks = self._ready.setdefault(lane, deque())
        tasks.append(task)

    def step(self) -> None:
        """One piece of the lane whose turn it is."""
        self._line_up()
        self._advance(next(iter(self._ready)))

    def run_quick(self) -> None:
        """Everything quick at the head of a lane."""
        self._line_up()
        for lane in list(self._ready):
            while (tasks := self._ready.get(lane)) and tasks[0].quick:
                self._advance(lane)
                self._line_up()

    def _advance(self, lane: str) -> None:
        tasks = self._ready.pop(lane)
        finished, awaited = tasks[0].advance()
        if finished:
            tasks.popleft()
        if awaited is not None:
            self._waiting[lane] = tasks
            awaited.add_done_callback(lambda _: self._call_soon(lambda: self._wake(lane)))
        elif tasks:
            self._had_turn[lane] = tasks

    def _line_up(self) -> None:
        self._ready.update(self._had_turn)
        self._had_turn.clear()

    def _all(self) -> tuple[dict[str, deque[Task]], ...]:
        return self._ready, self._had_turn, self._waiting

    def fail_all(self, error: MintError) -> None:
        for lanes in self._all():
            for tasks in lanes.values():
                for task in tasks:
                    task.fail(error)
            lanes.clear()

    def _wake(self, lane: str) -> None:
        if (tasks := self._waiting.pop(lane, None)) is not None:
            self._ready[lane] = tasks
