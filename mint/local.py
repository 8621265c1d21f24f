"""A server of this process's own: started as a child on loopback, stopped with the process, however that ends.

The child reads its standard input and exits when that ends, which the system sees to even if this process is killed.
It writes one line, `MINT_READY <address>`, to standard output once it is healthy.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from mint.config import ClientConfig, data_home
from mint.errors import Internal

READY = "MINT_READY "
START_WITHIN = 120.0
"""Seconds; most of a start is importing torch, which a cold disk can make long."""
STOP_WITHIN = 5.0
_LOGS_KEPT = 20
_LOG_TAIL = 20


class LocalServer:
    """One child process, its key and its address."""

    def __init__(self, command: Sequence[str], data: Path) -> None:
        self._key = secrets.token_urlsafe(24)
        self._address: str | None = None
        self._stopped = False
        self._ready = threading.Event()  # ready, or gone
        self._owner = os.getpid()
        self.log = _new_log(data / "logs")
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"MINT_API_KEY": self._key, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C in the terminal is for this process, which then stops the child
            )
        threading.Thread(target=self._listen, name="mint-local", daemon=True).start()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return not self._stopped and (os.getpid() != self._owner or self._child.poll() is None)

    def wait_until_ready(self, within: float = START_WITHIN) -> ClientConfig:
        """Where the server is and its key, once it is up; shows that something is going on meanwhile."""
        if not self._ready.is_set():
            with _progress(f"starting a local server (log: {self.log})"):
                self._ready.wait(within)
        if self._address is None:
            if self._ready.is_set():  # it has closed its output, and so is about to end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(STOP_WITHIN)
            state = self.obituary() or f"The local server was not ready within {within:.0f} s.\n{self._tail()}"
            self.stop()
            raise Internal(state)
        return ClientConfig(self._address, self._key)

    def obituary(self) -> str | None:
        """How the server ended, if it has."""
        if self.running:
            return None
        if self._stopped and self._address is not None:
            return "The local server was stopped with the program: ask for every result before the program ends."
        code = self._child.returncode
        end = f"was killed by signal {-code}" if code is not None and code < 0 else f"exited with status {code}"
        return f"The local server {end}. The end of its log, {self.log}:\n{self._tail()}"

    def stop(self) -> None:
        """Lets the server end by itself, then makes it."""
        if self._stopped or os.getpid() != self._owner:
            return
        self._stopped = True
        with contextlib.suppress(OSError):
            self._standard_input.close()
        for force in (None, signal.SIGTERM, signal.SIGKILL):
            if force is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._child.pid, force)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(STOP_WITHIN)
                return

    def leave_to_parent(self) -> None:
        """In a forked child: the server is still reached, but no longer held open from here."""
        os.close(self._standard_input.fileno())

    @property
    def _standard_input(self) -> IO[bytes]:
        assert self._child.stdin is not None
        return self._child.stdin

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(READY):
                self._address = text.removeprefix(READY)
                self._ready.set()
        self._ready.set()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL:]) or "(the log is empty)"


_server: LocalServer | None = None
_lock = threading.Lock()


def local_server() -> LocalServer:
    """This process's local server, started if there is none that lives; `wait_until_ready` says where it is."""
    global _server
    with _lock:
        if _server is None or not _server.running:
            data = data_home().absolute()
            _server = LocalServer([*COMMAND, "--port", "0", "--data", str(data), "--local"], data)
        return _server


COMMAND = (sys.executable, "-m", "mint.cli", "serve")


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    if _server is not None and _server.running:
        _server.leave_to_parent()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork)


def _new_log(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("local-*.log"), key=lambda file: file.stat().st_mtime)[: 1 - _LOGS_KEPT]:
        old.unlink(missing_ok=True)
    return folder / f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}.log"


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(what):
            yield
    else:
        print(f"mint: {what}", file=sys.stderr, flush=True)
        yield
