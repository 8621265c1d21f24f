"""Carries out one model's training requests, in order, each exactly once as far as anybody can see.

Requests come here from the journal's sequencer. They are handed to the backend without waiting for one another, and
answered in order. When the engine is lost, the model is brought back in the next one from its newest state, and what
came after that is carried out again; answers that were given stay as they are. What a request does is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from mint.backend import Backend
from mint.doorbell import arriving
from mint.errors import Busy, Internal, Interrupted, Lost, MintError
from mint.server.futures import Answer, Promise, error_answer
from mint.server.journal import Journal, Place
from mint.server.trial import DEATHS_ALONE, Trial

log = logging.getLogger("mint.server")

WAIT_FOR_ENGINE = 0.05


@dataclass(frozen=True)
class Step:
    """One request's work in the backend, and what its result is told as."""

    start: Callable[[], Future[Any]]
    answer: Callable[[Any], Answer]
    settled: Callable[[], None] | None = None
    """Called when it is over, well or badly."""
    accepted: Callable[[Promise], None] | None = None
    """Called when the request is safe, before anybody hears of that."""


@dataclass(eq=False)
class Entry:
    """A request in the journal."""

    place: Place
    promise: Promise
    changes_weights: bool
    flush_answer: bool
    """Whether the answer must be safe before it is given: it says that something outside the model has been done."""
    step: Step | None = None
    """As prepared when the request arrived; prepared again from the journal to be carried out again."""
    answered: bool = False
    failed: bool = False
    deaths_alone: int = 0
    work: Future[Any] | None = None
    """What the backend has been asked for."""
    outcome: Future[Any] | None = None


@dataclass(frozen=True, eq=False)
class StateMark:
    """Between two requests: here a segment begins, and its state is to be written."""

    segment: int


class Runner:
    def __init__(
        self,
        backend: Backend,
        adapter: str,
        journal: Journal,
        trial: Trial,
        prepare: Callable[[Entry], Step],
        make: Callable[[], list[Callable[[], Future[Any]]]],
    ) -> None:
        """`make`: the calls that make the adapter as it was before its first request."""
        self._backend, self._adapter, self._journal, self._trial = backend, adapter, journal, trial
        self._prepare, self._make = prepare, make
        self._queue: deque[Entry | StateMark] = deque()
        self._history: list[Entry | StateMark] = []  # handed to the backend since the newest state
        self._flight: deque[Entry] = deque()
        self._life = 0  # of the adapter; outcomes of an earlier one are dropped
        self._generation: int | None = None
        self._lost: int | None = None
        self._suspect: Entry | None = None
        self._restoring: asyncio.Task[None] | None = None
        self.failure: MintError | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the adapter is there for the first time, or failed with the reason it is not."""
        self.state_seconds = 0.0
        """What writing the newest state took."""
        self.state_pending = False

    # Requests -------------------------------------------------------------------------------------------------------

    def take(self, item: Entry | StateMark) -> None:
        self._queue.append(item)
        if isinstance(item, StateMark):
            self.state_pending = True
        self._pump()

    def cancel(self, entry: Entry) -> None:
        """Unless the backend has it already: then it is carried out, and its own answer comes."""
        if not entry.answered and entry not in self._history:
            self._answer(entry, error_answer(CancelledError()))

    def stop(self) -> None:
        """Cancels what the backend has not begun, the latest first: what was done is a beginning of what was asked."""
        for entry in reversed(self._queue):
            if isinstance(entry, Entry):
                self.cancel(entry)
        for entry in list(self._flight)[:0:-1]:  # the first of them is under way
            if entry.work is not None and not entry.answered:
                entry.work.cancel()

    def start(self) -> None:
        """Makes the adapter, or makes sure that it is there."""
        self._pump(even_idle=True)

    def fail(self, error: MintError) -> None:
        """The model is lost: every request, present and future, gets this error."""
        self.failure = error
        self._trial.leave(self._pump)
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # heard
        waiting, self._queue = self._queue, deque()
        for entry in (*self._flight, *waiting):
            if isinstance(entry, Entry) and not entry.answered:
                entry.answered = True
                self._settle(entry, error_answer(error))
        self._flight.clear()
        self._life += 1

    async def close(self, error: MintError) -> None:
        """Finishes what it was given; whatever comes later gets the error."""
        while (self._queue or self._flight or not self._journal.idle) and self.failure is None:
            await asyncio.sleep(WAIT_FOR_ENGINE)
        self.fail(self.failure or error)
        if self._restoring is not None:
            self._restoring.cancel()

    def _pump(self, even_idle: bool = False) -> None:
        """Hands on what may be handed on."""
        if self.failure is not None:
            self.fail(self.failure)
            return
        if self._restoring is not None or not (self._queue or even_idle):
            return
        while self._generation == self._backend.generation:
            if not self._queue or not self._trial.admits(self._pump):
                return
            if self._suspect is not None and self._suspect in self._history:
                return  # alone
            item = self._queue.popleft()
            self._history.append(item)
            if isinstance(item, StateMark):
                self._save_state(item)
            elif not item.answered or (item.changes_weights and not item.failed):
                self._begin(item)
        if self._flight:
            return  # their outcomes come first: they say whose fault it may have been
        self._restoring = asyncio.get_running_loop().create_task(self._restore())

    def _begin(self, entry: Entry) -> None:
        life = self._life
        self._flight.append(entry)
        try:
            if entry.step is None:
                entry.step = self._prepare(entry)
            if entry.deaths_alone >= DEATHS_ALONE:
                raise Internal(
                    f"the engine died {DEATHS_ALONE} times while it worked on this request and on nothing else, so it "
                    "was given up; the model is as it was before it. The server's log says how the engine died."
                )
            work = entry.step.start()
        except Exception as error:
            work = Future()
            work.set_exception(error)

        entry.work = work

        def done(told: asyncio.Future[Any]) -> None:
            if not told.cancelled():
                told.exception()  # heard, also where it is of no interest any more
            if life == self._life:
                entry.work, entry.outcome = None, work
                self._collect()

        arriving(work).add_done_callback(done)

    def _collect(self) -> None:
        """Answers in order."""
        while self._flight and (work := self._flight[0].outcome) is not None:
            if not work.cancelled() and isinstance(error := work.exception(), Interrupted):
                self._lose(engine=not isinstance(error, Lost))
                return
            entry = self._flight.popleft()
            entry.outcome = None
            if entry.answered:
                self._check_repeated(entry, work)
            else:
                self._answer(entry, _answer_of(entry, work))
        self._pump()

    def _check_repeated(self, entry: Entry, work: Future[Any]) -> None:
        entry.step = None
        if (error := work.exception()) is not None:
            self.fail(
                Internal(
                    f"training model {self._adapter} could not be brought back after its engine was lost: request "
                    f"{entry.promise.request_id}, which had succeeded, now fails ({error}). Go on from its newest "
                    "checkpoint."
                )
            )

    def _answer(self, entry: Entry, answer: Answer) -> None:
        """Writes the answer down, then gives it."""
        entry.answered, entry.failed = True, answer.failed
        head = {"kind": "result", "of": entry.promise.request_id, "failed": answer.failed, "media": answer.media_type}

        def written(outcome: Place | Busy) -> None:
            if isinstance(outcome, Busy):
                log.warning("a result is in memory only: %s", outcome)
            self._settle(entry, answer)

        self._journal.append(head, answer.body, written, flush=entry.flush_answer or answer.failed)
        if entry is self._suspect:
            self._suspect = None
            self._trial.leave(self._pump)
            self._pump()

    def _settle(self, entry: Entry, answer: Answer) -> None:
        entry.promise.settle(answer)
        if entry.step is not None and entry.step.settled is not None:
            entry.step.settled()
        entry.step = None  # it holds the request's data

    # States ---------------------------------------------------------------------------------------------------------

    def _save_state(self, mark: StateMark) -> None:
        life, started = self._life, time.monotonic()
        work = self._backend.save_state(self._adapter, str(self._journal.state(mark.segment)))

        def done(written: asyncio.Future[int]) -> None:
            error = None if written.cancelled() else written.exception()
            if life != self._life or isinstance(error, Interrupted):
                return  # it is written again when the engine is back
            self.state_pending = False
            self.state_seconds = time.monotonic() - started
            if error is not None:
                log.warning("the state of %s could not be written: %s", self._adapter, error)
                return
            self._journal.cover(mark.segment)
            self._history = self._history[self._history.index(mark) + 1 :]

        arriving(work).add_done_callback(done)

    # Losing the engine ----------------------------------------------------------------------------------------------

    def _lose(self, engine: bool = True) -> None:
        """The engine, or only what it held of this adapter: then it is made again in the same one."""
        head = self._flight[0]
        if engine and not head.answered:
            if self._trial.on(self._pump) and head is self._suspect:
                head.deaths_alone += 1
            self._suspect = head
            self._trial.join(self._pump)
        self._forget_engine()
        if not engine:
            self._lost = None
        self._pump()

    def _forget_engine(self) -> None:
        self._life += 1
        for entry in self._flight:
            entry.outcome = entry.step = None
        self._queue.extendleft(reversed(self._history))
        self._history.clear()
        self._flight.clear()
        self._lost, self._generation = self._generation, None

    async def _restore(self) -> None:
        """Makes the adapter anew in the present engine; what has to be repeated is in the queue afterwards."""
        if self._generation is not None:
            self._forget_engine()
        try:
            while True:
                while self._backend.generation == self._lost:
                    await asyncio.sleep(WAIT_FOR_ENGINE)
                generation = self._backend.generation
                try:
                    await self._make_adapter()
                    break
                except Lost:  # it left the device between two of these calls, and was damaged there
                    continue
                except Interrupted:
                    self._lost = generation
        except MintError as error:
            self._restoring = None
            self.fail(error)
            return
        self._generation, self._restoring = generation, None
        if not self.ready.done():
            self.ready.set_result(None)
        self._pump()

    async def _make_adapter(self) -> None:
        await arriving(self._backend.release(self._adapter))
        for call in self._make():
            await arriving(call())
        if (state := self._journal.newest_state()) is not None:
            await arriving(self._backend.load_state(self._adapter, str(state)))


def _answer_of(entry: Entry, work: Future[Any]) -> Answer:
    try:
        result = work.result()
        assert entry.step is not None
        return entry.step.answer(result)
    except (Exception, CancelledError) as error:
        return error_answer(error)
