"""One jailed process: starting it, feeding and draining it, and ending it at its limits, whatever it does.

How it is shut in is in `isolation.py`; what is asked of it in `sandbox.py`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

from mint.errors import BadRequest, Internal
from mint.rl.sandbox.child import READY
from mint.rl.sandbox.isolation import Isolation, Jail, environment, popen_identity, spare_uid

Killed = Literal["timeout", "flooded"]
Status = Literal["ok", "failed", "timeout", "flooded"]
"""ended well; ended with another exit code than 0; killed at the wall-clock limit; killed for too much output"""

CHILD_SOURCE = Path(__file__).with_name("child.py").read_text()


@dataclass(frozen=True)
class Limits:
    """What one child may use. Memory, CPU time and open files are per process, the rest for all of them together."""

    seconds: float = 10.0
    """Wall clock, from start to end."""
    cpu_seconds: int = 10
    memory_mb: int = 512
    """Address space."""
    processes: int = 8
    """Processes and threads, the first one included."""
    open_files: int = 64
    disk_mb: int = 16
    """The temporary folder, and so each file."""
    output_bytes: int = 1_000_000
    """Standard output and standard error, each."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise BadRequest(f"Limits({name}={value}): give a positive number; every limit is enforced")


@dataclass(frozen=True)
class Result:
    """How a program ended. What it printed is its own claim."""

    status: Status
    stdout: str
    stderr: str
    exit_code: int | None
    """None if it was still running and was killed."""
    seconds: float
    isolation: Isolation


class Child:
    """One jailed process: what is still to be written to it, what it has written, how it ended."""

    def __init__(
        self, jail: Jail, limits: Limits, role: str, payload: bytes, stdin: bytes = b"", pipes: tuple[int, ...] = ()
    ) -> None:
        self.isolation = jail.isolation
        self.output_bytes = limits.output_bytes
        self.unsent = memoryview(payload + stdin)
        self.stdout, self.stderr = bytearray(), bytearray()
        uid = spare_uid()
        self.folder = None if jail.isolation == "bubblewrap" else weak_folder(uid)
        home = self.folder or "/"
        arguments = [role, str(len(payload)), rlimits(limits, jail), *map(str, pipes)]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            jail.argv(limits.disk_mb, CHILD_SOURCE, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=home,
            env=environment(home),
            pass_fds=pipes,
            start_new_session=True,
            **popen_identity(uid),  # type: ignore[call-overload]
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin: IO[bytes] = self.process.stdin
        self.outputs = ((self.process.stdout, self.stdout), (self.process.stderr, self.stderr))
        for stream in (self.stdin, *(stream for stream, _ in self.outputs)):
            os.set_blocking(stream.fileno(), False)

    def feed(self) -> bool:
        """Write what its input takes; whether that was all."""
        try:
            self.unsent = self.unsent[os.write(self.stdin.fileno(), self.unsent) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self.unsent = memoryview(b"")
        return not self.unsent

    def drain(self, stream: IO[bytes], buffer: bytearray) -> bool:
        """Read what is there, at most one read past the limit; whether the stream has ended."""
        try:
            while len(buffer) <= self.output_bytes:
                data = os.read(stream.fileno(), 65536)
                if not data:
                    return True
                buffer += data
        except BlockingIOError:
            pass
        return False

    @property
    def flooded(self) -> bool:
        return max(len(self.stdout), len(self.stderr)) > self.output_bytes

    def close(self, killed: Killed | None) -> None:
        """Kill what is left of it; bubblewrap and unshare take their whole namespace along."""
        self.exit_code = self.process.poll()
        self.status: Status = killed or ("failed" if self.exit_code else "ok")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.seconds = time.monotonic() - self.started
        for stream in (self.stdin, *(stream for stream, _ in self.outputs)):
            stream.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def result(self) -> Result:
        stdout, stderr = (buffer[: self.output_bytes].decode("utf-8", "replace") for _, buffer in self.outputs)
        return Result(self.status, stdout, stderr, self.exit_code, self.seconds, self.isolation)


def weak_folder(uid: int | None) -> str:
    folder = tempfile.mkdtemp(prefix="sandbox-")
    if uid is not None:
        os.chown(folder, uid, uid)
    return folder


def rlimits(limits: Limits, jail: Jail) -> str:
    values = {
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory_mb * 2**20,
        "RLIMIT_NPROC": limits.processes + jail.spare_processes(),
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_FSIZE": limits.disk_mb * 2**20,
        "RLIMIT_CORE": 0,
    }
    return ",".join(f"{name}={value}" for name, value in values.items())


def supervise(children: Sequence[Child], seconds: float) -> Killed | None:
    """Feed and drain the children until the first of them ends or must be ended, then end all.

    A jail that never came up raises: that is this machine's fault, and no code should be scored for it.
    """
    killed = None
    try:
        killed = exchange(children, time.monotonic() + seconds)
    finally:
        for child in children:
            child.close(killed)
    for child in children:
        if child.stdout[:1] != READY:
            raise Internal(
                f"the sandbox ({child.isolation}) did not start in {child.seconds:.1f} s: exit code {child.exit_code},"
                f" {child.stderr.decode('utf-8', 'replace').strip()!r}; if the machine is overloaded, run fewer at once"
            )
        del child.stdout[:1]
    return killed


def exchange(children: Sequence[Child], deadline: float) -> Killed | None:
    """Move bytes until the first child has ended; or why all of them must be killed."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        first = os.pidfd_open(children[0].process.pid)
        stack.callback(os.close, first)
        selector.register(first, selectors.EVENT_READ)
        for child in children:
            selector.register(child.stdin, selectors.EVENT_WRITE, (child, None))
            for stream, buffer in child.outputs:
                selector.register(stream, selectors.EVENT_READ, (child, buffer))
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data is None:
                    for child in children:
                        for stream, buffer in child.outputs:
                            child.drain(stream, buffer)
                    return "flooded" if any(child.flooded for child in children) else None
                child, buffer = key.data
                if buffer is None and child.feed():
                    selector.unregister(child.stdin)
                    child.stdin.close()
                elif buffer is not None and child.drain(key.fileobj, buffer):
                    selector.unregister(key.fileobj)
                if child.flooded:
                    return "flooded"
        return "timeout"
