"""The shared library behind this room: compiled on this machine when it is first wanted, then kept.

Compiled at first use rather than at installation, because that is one way for wheels, editable installs and plain
source trees alike, and code for the very processor it runs on needs no variants. It takes a few seconds once, in the
background while the model is loading; later processes find it in `~/.cache/mint/native` under a name made of its source
and of the processor. Where there is no compiler, or no folder to write to, sampling and training go through torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: sums keep their order and what is not a number stays so. Hidden: a function of ours is never another
# library's of the same name.
FLAGS = ("-std=c++17", "-O2", "-march=native", "-fPIC", "-fvisibility=hidden", "-pthread")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Library:
    functions: ctypes.CDLL | None
    """None where there is none."""
    reason: str


@cache
def prepare() -> Future[Library]:
    """Begins to look for the library, and to compile it if need be, in a thread of its own."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mint-compiler")
    found = executor.submit(_find)
    executor.shutdown(wait=False)
    return found


def library() -> Library:
    """Waits for it."""
    return prepare().result()


def _find() -> Library:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = home / "mint" / "native" / f"native-{_fingerprint()}.so"
        if not path.exists():
            compile_to(path)
        return Library(ctypes.CDLL(str(path)), f"native code for this processor ({path})")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        output = getattr(error, "stderr", None)
        log.warning(
            "sampling and training go through torch: no native code (%s)%s", error, f"\n{output}" if output else ""
        )
        return Library(None, f"torch, as native code could not be made ({error})")


def compile_to(path: Path) -> None:
    """Whole or not at all: several processes may want it at once."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no C++ compiler: none of {', '.join(COMPILERS)}")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(made.with_name(f"{source.stem}.o")) for source in sources]
        steps = [["-c", str(source), "-o", object] for source, object in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(max_workers=len(steps)) as at_once:
            list(at_once.map(partial(_compile, compiler), steps))
        _compile(compiler, ["-shared", *objects, "-o", str(made)])
        os.replace(made, path)


def _compile(compiler: str, arguments: list[str]) -> None:
    subprocess.run([compiler, *FLAGS, *arguments], check=True, capture_output=True, text=True, timeout=300)


def _fingerprint() -> str:
    sources = [file.read_bytes() for file in sorted(SOURCES.glob("*.[ch]*"))]
    return hashlib.sha256(b"\0".join([*sources, " ".join(FLAGS).encode(), _processor().encode()])).hexdigest()[:16]


def _processor() -> str:
    """What decides which instructions there are."""
    described = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{described} {platform.processor()} {platform.node()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    return described + "".join(next((line for line in lines if line.startswith(name)), "") for name in wanted)
