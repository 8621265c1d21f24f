"""`SupervisedEngine`: an `EngineProcess` that is started again when it dies, as one `Backend`.

A new child is a new generation. It has the base models its calls name, but no adapter and no policy: bringing those
back is the business of whoever made them. What was under way fails with `Interrupted`; the calls that need nothing but
a base model and files are made again here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from mint.backend import AdapterFacts, Backend, ModelFacts, OnTokens
from mint.engine.process import EngineProcess, make_engine
from mint.engine.spawn import Child
from mint.errors import Interrupted
from mint.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, SampleRequest, SampleResponse

log = logging.getLogger(__name__)

TRIES = 3
"""How often a call that can be repeated is made, if engines die of it."""
STEADY_SECONDS = 30.0
"""An engine that lived this long was well: the next one is started without a pause."""
LONGEST_PAUSE = 10.0
STARTS = 5
"""How many engines may be killed before the first one is ready."""


class SupervisedEngine:
    """Implements `mint.backend.Backend`."""

    def __init__(
        self,
        models: Sequence[str] | None = None,
        on_failure: Callable[[int], None] | None = None,
        make: Callable[[Sequence[str] | None], Backend] = make_engine,
        child: Child | None = None,
    ) -> None:
        """`on_failure` hears the exit code if no engine ever got ready: the first gave up by itself, or was killed
        again and again. `child`: the first one's process, started already."""
        self._models, self._on_failure, self._make = models, on_failure, make
        self._lock = threading.Lock()  # guards which engine there is
        self._closed = threading.Event()
        self._deaths = 0
        self._failed = self._ever_ready = False
        self._again: list[Callable[[], None]] = []  # calls to be made again when there is another engine
        self.generation = 0
        with self._lock:  # an engine that dies at once is heard of after this
            self._engine = self._start(child)

    @property
    def pid(self) -> int:
        return self._engine.pid

    @property
    def usable(self) -> bool:
        """False once the first engine turned out not to start."""
        return not self._failed

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            engine = self._engine
        engine.close()
        self._call_again()

    def _start(self, child: Child | None = None) -> EngineProcess:
        self._started = time.monotonic()
        return EngineProcess(self._models, on_exit=self._restart, make=self._make, child=child)

    def _restart(self, code: int) -> None:
        """On the thread of the engine that died."""
        with self._lock:
            self._ever_ready |= self._engine.ready.exception() is None  # it is done: what was pending has failed
        self._deaths = 0 if time.monotonic() - self._started > STEADY_SECONDS else self._deaths + 1
        if not self._ever_ready and (code >= 0 or self._deaths >= STARTS):
            self._failed = True
            self._closed.set()
            if self._on_failure is not None:
                self._on_failure(code)
        pause = min(LONGEST_PAUSE, 0.1 * 2**self._deaths) if self._deaths > 2 else 0.0
        if not self._closed.wait(pause):
            log.warning("the engine process ended with status %s; another is started", code)
            with self._lock:
                self._engine = engine = self._start()
                self.generation += 1
            engine.ready.add_done_callback(lambda ready: self._check_start(engine))
            if self._closed.is_set():  # in the meantime
                engine.close()
        self._call_again()

    def _check_start(self, engine: EngineProcess) -> None:
        """A later engine that cannot start (its device is gone, say) is no reason to fail what waits for it."""
        if not _started_well(engine):
            log.error("the engine could not start: %s", engine.ready.exception())
            engine.kill()

    def _call_again(self) -> None:
        with self._lock:
            calls, self._again = self._again, []
        for call in calls:
            call()

    # ----------------------------------------------------------------------------------------------------------------
    # The calls

    def models(self) -> list[str]:
        return self._engine.models()

    def load_model(self, base_model: str) -> Future[ModelFacts]:
        return self._repeated(lambda engine: engine.load_model(base_model))

    def load_policy(self, policy: str, base_model: str, folder: str | None) -> Future[None]:
        return self._repeated(lambda engine: engine.load_policy(policy, base_model, folder))

    def combine(self, folders: Sequence[str], coefficients: Sequence[float], folder: str) -> Future[LoraConfig]:
        return self._repeated(lambda engine: engine.combine(folders, coefficients, folder))

    def release(self, name: str) -> Future[None]:
        return self._repeated(lambda engine: engine.release(name))

    def stats(self) -> Future[dict[str, float]]:
        return self._repeated(lambda engine: engine.stats())

    def create_adapter(self, adapter: str, base_model: str, lora: LoraConfig) -> Future[AdapterFacts]:
        return self._once(lambda engine: engine.create_adapter(adapter, base_model, lora))

    def forward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._once(lambda engine: engine.forward(adapter, data, loss_fn, config))

    def forward_backward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._once(lambda engine: engine.forward_backward(adapter, data, loss_fn, config))

    def reverse_kl(
        self,
        adapter: str,
        reference: str | None,
        data: Sequence[Datum],
        reference_data: Sequence[Datum],
        temperature: float,
    ) -> Future[ForwardBackwardOutput]:
        return self._once(lambda engine: engine.reverse_kl(adapter, reference, data, reference_data, temperature))

    def optim_step(self, adapter: str, params: AdamParams) -> Future[dict[str, float]]:
        return self._once(lambda engine: engine.optim_step(adapter, params))

    def save_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[int]:
        return self._once(lambda engine: engine.save_adapter(adapter, folder, optimizer))

    def load_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[None]:
        return self._once(lambda engine: engine.load_adapter(adapter, folder, optimizer))

    def save_state(self, adapter: str, folder: str) -> Future[int]:
        return self._once(lambda engine: engine.save_state(adapter, folder))

    def load_state(self, adapter: str, folder: str) -> Future[None]:
        return self._once(lambda engine: engine.load_state(adapter, folder))

    def snapshot(self, adapter: str, policy: str, folder: str | None = None) -> Future[dict[str, float]]:
        return self._once(lambda engine: engine.snapshot(adapter, policy, folder))

    def sample(self, policy: str, request: SampleRequest, on_tokens: OnTokens | None = None) -> Future[SampleResponse]:
        return self._once(lambda engine: engine.sample(policy, request, on_tokens))

    def _once(self, call: Callable[[EngineProcess], Future[Any]]) -> Future[Any]:
        """Whatever fails because the engine was lost, or is another one than the caller knew, is `Interrupted`."""
        generation, engine = self.generation, self._engine
        inner = call(engine)
        outer: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            if done.cancelled() or not outer.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is None:
                outer.set_result(done.result())
            elif not isinstance(error, Interrupted) and self._other_than(generation, engine):
                outer.set_exception(Interrupted(str(error)))
            else:
                outer.set_exception(error)

        outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        inner.add_done_callback(settle)
        return outer

    def _other_than(self, generation: int, engine: EngineProcess) -> bool:
        """Whether a failure may be due to the engine and not to the call. That the first engine cannot start is told as
        it is: nothing is lost yet, and a second would fare no better."""
        return generation != self.generation or (generation > 0 and not _started_well(engine))

    def _repeated(self, call: Callable[[EngineProcess], Future[Any]]) -> Future[Any]:
        result: Future[Any] = Future()
        result.set_running_or_notify_cancel()

        def attempt(left: int) -> None:
            engine = self._engine

            def settle(done: Future[Any]) -> None:
                error = done.exception()
                if isinstance(error, Interrupted) and left > 1 and not self._closed.is_set():
                    with self._lock:
                        replaced = self._engine is not engine
                        if not replaced:
                            self._again.append(lambda: attempt(left - 1))
                    if replaced:
                        attempt(left - 1)
                elif error is not None:
                    result.set_exception(error)
                else:
                    result.set_result(done.result())

            self._once(call).add_done_callback(settle)

        attempt(TRIES)
        return result


def _started_well(engine: EngineProcess) -> bool:
    """Or is still at it."""
    return not engine.ready.done() or engine.ready.exception() is None
