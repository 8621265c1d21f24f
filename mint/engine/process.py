"""`EngineProcess`: an engine in a child process, as a `Backend` in this one. This side imports no torch.

Messages are pickles over one pipe: (call, method, arguments) to the child, (call, kind, payload) back, where kind is
"result", "error" or "tokens". The child (`child.py`) ends when the pipe does, whatever happened to the parent.
Restarting a child that died is the business of whoever owns this object: `on_exit` tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from mint.backend import AdapterFacts, Backend, ModelFacts, OnTokens
from mint.engine.hub import BUNDLED
from mint.engine.spawn import Child, start_child
from mint.errors import Internal, Interrupted
from mint.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, SampleRequest, SampleResponse

log = logging.getLogger(__name__)

# Seconds a child gets to end by itself; it only has to wake up.
GRACE = 2.0


def make_engine(
    models: Sequence[str] | None,
    max_adapters: int | None = None,
    spill: Path | None = None,
    lean: bool = False,
    deterministic: bool = False,
    bfloat16: bool = False,
) -> Backend:
    from mint.engine.device import pick_device
    from mint.engine.engine import Engine

    device = pick_device(steady=deterministic, bfloat16_products=bfloat16)
    return Engine(models, device, room=max_adapters, spill=spill, lean=lean)


class EngineProcess:
    """Implements `mint.backend.Backend`. Returns at once; calls made while the child starts wait for it."""

    generation = 0

    def __init__(
        self,
        models: Sequence[str] | None = None,
        on_exit: Callable[[int], None] | None = None,
        make: Callable[[Sequence[str] | None], Backend] = make_engine,
        child: Child | None = None,
    ) -> None:
        """`make`, a function the child can import, makes the backend there. `on_exit` hears the exit code of a child
        that was not closed, after every pending future has failed. `child`: one that was started already."""
        self._catalogue = None if models is None else list(models)
        self._asked: dict[str, None] = dict.fromkeys(BUNDLED)
        self._on_exit = on_exit
        self._lock = threading.Lock()  # guards what follows, and whole messages on the pipe
        self._pending: dict[int, tuple[Future[Any], OnTokens | None]] = {}
        self._ended: str | None = None  # how
        self._closing = False
        self._ids = itertools.count()
        self._outbox: list[bytes] = []
        started: Future[Child] = Future()
        # The thread that starts the child also waits for it to the end: on Linux the child dies with that thread.
        self._reader = threading.Thread(target=self._run, args=(child, started), name="mint-pipe", daemon=True)
        self._reader.start()
        self._child = started.result()
        self.ready: Future[None] = self._call("make", make, models)
        """Done when the child has its engine, or failed with the reason it has none."""

    @property
    def alive(self) -> bool:
        return self._ended is None

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def models(self) -> list[str]:
        return list(self._asked) if self._catalogue is None else list(self._catalogue)

    def load_model(self, base_model: str) -> Future[ModelFacts]:
        return self._noting(base_model, self._call("load_model", base_model))

    def create_adapter(self, adapter: str, base_model: str, lora: LoraConfig) -> Future[AdapterFacts]:
        return self._noting(base_model, self._call("create_adapter", adapter, base_model, lora))

    def forward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._call("forward", adapter, data, loss_fn, config)

    def forward_backward(
        self, adapter: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, float | str]
    ) -> Future[ForwardBackwardOutput]:
        return self._call("forward_backward", adapter, data, loss_fn, config)

    def reverse_kl(
        self,
        adapter: str,
        reference: str | None,
        data: Sequence[Datum],
        reference_data: Sequence[Datum],
        temperature: float,
    ) -> Future[ForwardBackwardOutput]:
        return self._call("reverse_kl", adapter, reference, data, reference_data, temperature)

    def optim_step(self, adapter: str, params: AdamParams) -> Future[dict[str, float]]:
        return self._call("optim_step", adapter, params)

    def save_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[int]:
        return self._call("save_adapter", adapter, folder, optimizer)

    def load_adapter(self, adapter: str, folder: str, optimizer: bool) -> Future[None]:
        return self._call("load_adapter", adapter, folder, optimizer)

    def save_state(self, adapter: str, folder: str) -> Future[int]:
        return self._call("save_state", adapter, folder)

    def load_state(self, adapter: str, folder: str) -> Future[None]:
        return self._call("load_state", adapter, folder)

    def snapshot(self, adapter: str, policy: str, folder: str | None = None) -> Future[dict[str, float]]:
        return self._call("snapshot", adapter, policy, folder)

    def combine(self, folders: Sequence[str], coefficients: Sequence[float], folder: str) -> Future[LoraConfig]:
        return self._call("combine", folders, coefficients, folder)

    def load_policy(self, policy: str, base_model: str, folder: str | None) -> Future[None]:
        return self._noting(base_model, self._call("load_policy", policy, base_model, folder))

    def sample(self, policy: str, request: SampleRequest, on_tokens: OnTokens | None = None) -> Future[SampleResponse]:
        return self._call("sample", policy, request, on_tokens is not None, on_tokens=on_tokens)

    def release(self, name: str) -> Future[None]:
        return self._call("release", name)

    def stats(self) -> Future[dict[str, float]]:
        return self._call("stats")

    def close(self) -> None:
        """Ends the child; whatever it had not finished fails."""
        with self._lock:
            self._closing = True
            self._outbox.append(_pickled(0, "close"))
            self._flush()
        if threading.current_thread() is not self._reader:
            self._reader.join(GRACE)
            if self._reader.is_alive():
                self._child.process.kill()
                self._reader.join()

    def kill(self) -> None:
        """Ends the child at once, as if it had died by itself."""
        self._child.process.kill()

    def _call(self, method: str, *args: Any, on_tokens: OnTokens | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        call = next(self._ids)
        message = _pickled(call, method, *args)
        with self._lock:
            ended = self._ended
            if ended is None:
                self._pending[call] = (future, on_tokens)
                self._send(message)
        if ended is not None:
            future.set_exception(Interrupted(ended))
        future.add_done_callback(partial(self._pass_on_cancel, call))
        return future

    def _send(self, message: bytes) -> None:
        """Under the lock. What an event loop sends in one go leaves together when it is done with that."""
        self._outbox.append(message)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a thread without a loop
            self._flush()
        else:
            if len(self._outbox) == 1:
                loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        """Under the lock. A broken pipe is no news here: the reader sees it too, and fails what is pending."""
        messages, self._outbox = self._outbox, []
        if messages:
            with contextlib.suppress(OSError):
                self._child.pipe.send(messages)

    def _pass_on_cancel(self, call: int, future: Future[Any]) -> None:
        if future.cancelled():
            with self._lock:
                if self._pending.pop(call, None) is not None:
                    self._send(_pickled(call, "cancel"))

    def _noting(self, model: str, future: Future[Any]) -> Future[Any]:
        def note(done: Future[Any]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._asked[model] = None

        future.add_done_callback(note)
        return future

    def _run(self, child: Child | None, started: Future[Child]) -> None:
        try:
            child = child or start_child()
        except OSError as error:
            started.set_exception(Internal(f"the engine process could not be started: {error}"))
            return
        started.set_result(child)
        try:
            while True:
                for message in child.pipe.receive():
                    self._receive(*pickle.loads(message))
        except (EOFError, OSError):
            self._end(child)

    def _receive(self, call: int, kind: str, payload: Any) -> None:
        with self._lock:
            future, on_tokens = self._pending.get(call) or (None, None)
            if kind != "tokens":
                self._pending.pop(call, None)
        if future is None:  # cancelled in the meantime
            return
        if kind == "tokens":
            if on_tokens is not None:
                _report(on_tokens, *payload)
        elif future.set_running_or_notify_cancel():
            if kind == "error":
                future.set_exception(payload)
            else:
                future.set_result(payload)

    def _end(self, child: Child) -> None:
        """The child is gone, or has closed its end and is about to."""
        try:
            code = child.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.process.kill()
            code = child.process.wait()
        with self._lock:
            closing = self._closing
            reason = "was closed" if closing else f"died ({_describe(code)})"
            self._ended = ended = f"the engine process {reason}; this request was not carried out."
            pending, self._pending = self._pending, {}
            child.pipe.close()
        for future, _ in pending.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(Interrupted(ended))
        if self._on_exit and not closing:
            self._on_exit(code)


def _pickled(call: int, method: str, *args: Any) -> bytes:
    return pickle.dumps((call, method, args), protocol=5)


def _describe(code: int) -> str:
    if code < 0:
        return f"exit code {code}: killed by {signal.Signals(-code).name}"
    return f"exit code {code}; its log says why"


def _report(on_tokens: OnTokens, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    try:
        on_tokens(index, tokens, logprobs)
    except Exception:  # somebody else's code, on the thread everybody's answers come through
        log.exception("a listener to sampled tokens failed")
