"""How a child process is shut in: the command lines of the strong and the weak jail, and which of them work here.

What runs inside is `child.py`, who starts and watches it is `process.py`; docs/sandbox.md says what each jail contains
and what it lacks.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

from mint.errors import MintError

Isolation = Literal["bubblewrap", "namespaces", "process"]

INSTALL_HINT = "install bubblewrap 0.8 or newer (`apt-get install bubblewrap`, `dnf install bubblewrap`)"
# Above every range that distributions, containers and systemd hand out, below 2**31.
SPARE_UIDS = range(1_900_000_000, 2_100_000_000)
PROBE = "import sys; assert sys.version_info >= (3, 10), sys.version; print('works')"


class IsolationUnavailable(MintError, RuntimeError):
    """This machine cannot run untrusted code as safely as was asked for."""


@dataclass(frozen=True)
class Interpreter:
    """A Python and the folders it needs to see."""

    executable: str
    folders: tuple[str, ...]
    flags: tuple[str, ...]

    def argv(self, source: str, *arguments: str) -> list[str]:
        return [self.executable, *self.flags, "-c", source, *arguments]


@dataclass(frozen=True)
class Jail:
    isolation: Isolation
    interpreter: Interpreter

    def argv(self, disk_mb: int, source: str, *arguments: str) -> list[str]:
        command = self.interpreter.argv(source, *arguments)
        if self.isolation == "bubblewrap":
            return [*bubblewrap(self.interpreter, disk_mb), *command]
        return [*weak(self.isolation), *command]

    def spare_processes(self) -> int:
        """Tasks that RLIMIT_NPROC counts besides the child's own: a helper in its namespace, or all of the user's."""
        if self.isolation != "process":
            return 1
        return 0 if os.geteuid() == 0 else tasks_of_this_user()


def bubblewrap(interpreter: Interpreter, disk_mb: int) -> list[str]:
    argv = [tool("bwrap"), "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    argv += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    for name, value in environment("/tmp").items():
        argv += ["--setenv", name, value]
    argv += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            argv += ["--symlink", os.readlink(folder), folder]
        else:
            argv += ["--ro-bind-try", folder, folder]
    # bwrap's own /dev and / are writable and without a size; the two writable places that are left have one.
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(2**20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    argv += ["--size", str(disk_mb * 2**20), "--tmpfs", "/tmp"]
    for folder in interpreter.folders:  # last: one may lie in /tmp
        argv += ["--ro-bind", folder, folder]
    return [*argv, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def weak(isolation: Isolation) -> list[str]:
    argv = [tool("setpriv"), "--no-new-privs", "--pdeathsig", "KILL", "--"]
    if isolation == "namespaces":
        argv += [tool("unshare"), "--user", "--map-current-user", "--net", "--ipc", "--uts", "--pid", "--mount-proc"]
        argv += ["--fork", "--kill-child", "--"]
    return argv


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path


def environment(home: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}


def spare_uid() -> int | None:
    """For root: a user id nobody has, new for each child, so that the process limit binds and counts this child alone.

    For anybody else None: only root may change its id.
    """
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        mapped = max(int(line.split()[0]) + int(line.split()[2]) for line in file)
    return random.SystemRandom().choice(SPARE_UIDS) if mapped >= SPARE_UIDS.stop else 65534


def popen_identity(uid: int | None) -> dict[str, object]:
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


def tasks_of_this_user() -> int:
    tasks = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                tasks += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:  # it ended while we looked
            continue
    return tasks


def interpreters(python: str | None) -> list[Interpreter]:
    """The given Python with its packages; by default this one's standard library alone, or the system's.

    The system's is second choice, for root whose own Python lies where no other user may look (/root/...).
    """
    if python is not None:
        ask = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
        answer = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, check=True)
        executable, *folders = json.loads(answer.stdout)
        return [Interpreter(executable, tuple({*folders} - {"/usr"}), ("-I",))]
    own = os.path.realpath(sys.executable)
    folders = {sys.base_prefix, sys.base_exec_prefix} - {"/usr"}
    alone = ("-I", "-S")
    return [Interpreter(own, tuple(folders), alone), Interpreter("/usr/bin/python3", (), alone)]


@functools.cache
def find_jail(require_isolation: bool, python: str | None) -> Jail:
    """The strongest jail that works here; only bubblewrap will do unless weaker ones are allowed."""
    if sys.platform != "linux":
        raise IsolationUnavailable(f"the sandbox is built on Linux namespaces and limits; this is {sys.platform}")
    levels: tuple[Isolation, ...] = ("bubblewrap",) if require_isolation else ("bubblewrap", "namespaces", "process")
    complaints = []
    for isolation in levels:
        for interpreter in interpreters(python):
            complaint = try_out(Jail(isolation, interpreter))
            if complaint is None:
                return Jail(isolation, interpreter)
            complaints.append(f"{isolation} with {interpreter.executable}: {complaint}")
    raise IsolationUnavailable(
        "untrusted code cannot be isolated on this machine:\n  "
        + "\n  ".join(complaints)
        + f"\nTo run it, {INSTALL_HINT} and allow unprivileged user namespaces; if every interpreter is out of reach,"
        " pass python= one that all users may execute. Sandbox(require_isolation=False) accepts weaker protection."
    )


def try_out(jail: Jail) -> str | None:
    """Run nothing much in it; what went wrong, or None."""
    try:
        process = subprocess.run(
            jail.argv(1, PROBE),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            cwd="/",
            env=environment("/"),
            **popen_identity(spare_uid()),  # type: ignore[call-overload]
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if process.returncode == 0 and process.stdout == "works\n":
        return None
    return process.stderr.strip() or f"exit code {process.returncode}"
