"""The child's side of `EngineProcess`: serves a backend's calls from a pipe, and ends when the pipe does."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from mint.backend import Backend
from mint.engine.faults import as_mint_error
from mint.errors import MintError

log = logging.getLogger(__name__)

Message = tuple[int, str, tuple[Any, ...]]


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    _die_with_parent()
    # transformers imports it where it is installed, which takes half a second, for things that are not done here.
    sys.modules.setdefault("accelerate", None)  # type: ignore[arg-type]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s engine %(levelname)s %(message)s")
    pipe = Connection(fd)
    inbox: SimpleQueue[Message] = SimpleQueue()
    # Always listening, so that the end of the pipe is noticed also while a model loads.
    threading.Thread(target=_listen, args=(pipe, inbox), name="mint-pipe", daemon=True).start()
    servant = Servant(pipe)
    while True:
        servant.obey(*inbox.get())


def _listen(pipe: Connection, inbox: SimpleQueue[Message]) -> None:
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            _exit()
        except Exception:  # a pickle this process cannot read, so a call that would never be answered
            log.exception("the parent sent a message that cannot be read")
            _exit(1)
        if message[1] == "close":
            _exit()
        inbox.put(message)


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

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()  # answers come from the backend's threads
        self._futures: dict[int, Future[Any]] = {}
        self._backend: Backend | None = None
        self._failure: MintError | None = None

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
                self._pipe.send_bytes(message)
            except OSError:
                _exit()
