"""The engine's thread that samples and decides, its inbox, and how it divides its time.

When training and sampling both have work, each gets half of the time: after a piece of training, or several short ones,
which take as long as a step of the samplers, these step for as long as that took. Quick tasks (a snapshot, a sample to
start) never wait for either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from mint.engine.device import wait_for_gpu
from mint.engine.faults import as_mint_error
from mint.engine.lanes import Lanes, Task
from mint.engine.sampler.sampler import Sampler
from mint.errors import Internal


class Worker:
    def __init__(self, samplers: Callable[[], Sequence[Sampler]]) -> None:
        """`samplers`, called on the worker, says which there are by now."""
        self._samplers = samplers
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.lanes = Lanes(self._inbox.put)
        self._owed = 0.0  # seconds of sampling due before the next piece of training
        self._step = 0.0  # seconds of the samplers' last step
        self._closed = False
        self._gate = threading.Lock()  # no task enters the inbox once it is closed
        self._thread = threading.Thread(target=self._run, name="mint-engine", daemon=True)
        self._thread.start()

    def submit(self, lane: str, work: Callable[[], Any], quick: bool = False) -> Future[Any]:
        """From any thread: queues a task (see `lanes.Task`)."""
        task = Task(Future(), work, quick)
        with self._gate:
            if not self._closed:
                self._inbox.put(lambda: self.lanes.add(lane, task))
                return task.future
        task.fail(_closed_error())
        return task.future

    def others_wait(self) -> bool:
        """On the worker, for the task whose turn it is: whether there is somebody else to have one."""
        return self.lanes.has_work or not self._inbox.empty()

    def call_soon(self, call: Callable[[], None]) -> None:
        """From any thread: runs the call on the worker before its next step."""
        self._inbox.put(call)

    def close(self) -> None:
        """Whatever has not finished fails. Returns when the thread has ended, after its present step."""
        with self._gate:
            self._closed = True
        self._inbox.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._drain()
                self._turn()
        finally:  # also if this thread itself fails: nobody may wait for it in vain
            with self._gate:
                self._closed = True
            while not self._inbox.empty():
                self._inbox.get()()
            self.lanes.fail_all(_closed_error())
            for sampler in self._samplers():
                sampler.abort(_closed_error(), everything=True)

    def _drain(self) -> None:
        """Takes in what has arrived; waits for something if there is nothing else to do."""
        if not self.lanes.has_work and not any(sampler.has_work for sampler in self._samplers()):
            self._inbox.get()()
        self._take_in()

    def _take_in(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _turn(self) -> None:
        self.lanes.run_quick()
        sampling = [sampler for sampler in self._samplers() if sampler.has_work]
        if self.lanes.has_work and (self._owed <= 0 or not sampling):
            _each(sampling, lambda sampler: sampler.settle())  # so that the time of one is not taken for the other's
            self._owed = self._train(bool(sampling))
        started = time.perf_counter()
        _each(sampling, lambda sampler: sampler.step())
        self._step = time.perf_counter() - started
        self._owed -= self._step

    def _train(self, sampling: bool) -> float:
        """A piece of training; where somebody samples, as many as go into the time of a step. The seconds they took."""
        started = time.perf_counter()
        while True:
            self.lanes.step()
            if sampling:
                wait_for_gpu()  # it may still be at what this step gave it, which is time of training
            took = time.perf_counter() - started
            self._take_in()
            if not sampling or took >= self._step or not self.lanes.has_work:
                return took


def _each(samplers: Sequence[Sampler], work: Callable[[Sampler], object]) -> None:
    """What fails for one sampler fails what runs in it, and nothing else."""
    for sampler in samplers:
        try:
            work(sampler)
        except Exception as error:
            sampler.abort(as_mint_error(error))


def _closed_error() -> Internal:
    return Internal("the engine was closed before it finished this request.")
