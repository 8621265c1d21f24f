"""The child's side of `EngineProcess`: serves a backend's calls from a pipe, and ends when the pipe does."""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from mint.backend import Backend
from mint.engine.faults import as_mint_error
from mint.engine.pipe import Pipe
from mint.engine.quick_imports import quick_imports
from mint.errors import MintError

log = logging.getLogger(__name__)

Message = tuple[int, str, tuple[Any, ...]]


def main(fd: int, imports: Sequence[str]) -> None:
    """Imports what will be wanted, makes the backend it is told to, and serves it until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    _die_with_parent()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s engine %(levelname)s %(message)s")
    pipe = Pipe(socket.socket(fileno=fd))
    calls = Calls(Servant(pipe))
    # Always listening, so that the end of the pipe is noticed also while a model loads.
    threading.Thread(target=_listen, args=(pipe, calls), name="mint-pipe", daemon=True).start()
    gc.disable()  # until the backend is made, as there
    with quick_imports(), suppress(Exception):  # what cannot be imported is told by who makes the backend
        for name in imports:
            importlib.import_module(name)
    calls.obey_first()
    threading.Event().wait()


class Calls:
    """The first call makes the backend, here on the main thread, which may take long. Those that come meanwhile wait;
    later ones are obeyed on the thread that hears them, without a change of threads."""

    def __init__(self, servant: Servant) -> None:
        self._servant = servant
        self._changed = threading.Condition()
        self._waiting: deque[Message] = deque()
        self._direct = False

    def hear(self, message: Message) -> None:
        with self._changed:
            if not self._direct:
                self._waiting.append(message)
                self._changed.notify()
                return
        self._servant.obey(*message)

    def obey_first(self) -> None:
        """Until nothing waits any more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._servant.is_made)
                if not self._waiting:
                    self._direct = True
                    return
                message = self._waiting.popleft()
            self._servant.obey(*message)


def _listen(pipe: Pipe, calls: Calls) -> None:
    while True:
        try:
            messages: list[Message] = [pickle.loads(message) for message in pipe.receive()]
        except (EOFError, OSError):
            _exit()
        except Exception:  # a pickle this process cannot read, so a call that would never be answered
            log.exception("the parent sent a message that cannot be read")
            _exit(1)
        for message in messages:
            if message[1] == "close":
                _exit()
            calls.hear(message)


def _exit(code: int = 0) -> NoReturn:
    # Not sys.exit, which would wait for the step under way. What is half saved is as if it had never been.
    os._exit(code)


def _die_with_parent() -> None:
    """On Linux the kernel kills us with the parent, even if the pipe is still held open by somebody it forked."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


class Servant:
    """Turns messages into calls of a backend, and its futures into messages."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()  # answers come from the backend's threads
        self._futures: dict[int, Future[Any]] = {}
        self._backend: Backend | None = None
        self._failure: MintError | None = None

    @property
    def is_made(self) -> bool:
        """Whether the backend has been made, or has turned out not to."""
        return self._backend is not None or self._failure is not None

    def obey(self, call: int, method: str, args: tuple[Any, ...]) -> None:
        if method == "cancel":
            if (future := self._futures.get(call)) is not None:
                future.cancel()
        elif method == "make":
            self._make(call, *args)
        elif self._backend is None:
            self._send(call, "error", self._failure)
        else:
            self._call(self._backend, call, method, args)

    def _make(self, call: int, make: Callable[..., Backend], *args: Any) -> None:
        gc.disable()  # importing makes a million objects that stay: looking through them takes half a second
        try:
            with quick_imports():
                self._backend = make(*args)
        except Exception as error:
            self._failure = as_mint_error(error)
            self._send(call, "error", self._failure)
        else:
            # What was imported and loaded stays: no full collection need look through all of it again.
            gc.freeze()
            self._send(call, "result", None)
        finally:
            gc.freeze()
            gc.enable()

    def _call(self, backend: Backend, call: int, method: str, args: tuple[Any, ...]) -> None:
        if method == "sample":
            policy, request, listened = args
            args = (policy, request, partial(self._send_tokens, call) if listened else None)
        try:
            future: Future[Any] = getattr(backend, method)(*args)
        except Exception as error:
            self._send(call, "error", as_mint_error(error))
            return
        self._futures[call] = future
        future.add_done_callback(partial(self._answer, call))

    def _answer(self, call: int, future: Future[Any]) -> None:
        self._futures.pop(call, None)
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._send(call, "result", future.result())
        else:
            self._send(call, "error", as_mint_error(error))

    def _send_tokens(self, call: int, *tokens: Any) -> None:
        self._send(call, "tokens", tokens)

    def _send(self, call: int, kind: str, payload: Any) -> None:
        message = pickle.dumps((call, kind, payload), protocol=5)
        with self._lock:
            try:
                self._pipe.send([message])
            except OSError:
                _exit()
