"""Virtual environments of other people's clients, built once under `.venvs/` and reused while their pins stay."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1] / ".venvs"


def environment(name: str, say: Callable[[str], None]) -> Path:
    """The folder of environment `name`, built from `requirements-<name>.txt` if it is not there or no longer fits."""
    requirements = HERE / f"requirements-{name}.txt"
    folder, mark = ROOT / name, ROOT / name / "built"
    fits = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    with _only_one(ROOT / f"{name}.lock"):
        if not (mark.is_file() and mark.read_text() == fits):
            say(f"building {folder} from {requirements.name}: one to four minutes, the first time only ...")
            started = time.monotonic()
            _build(folder, requirements)
            mark.write_text(fits)
            say(f"built {folder} in {time.monotonic() - started:.0f} s")
    return folder


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def packages_of(folder: Path) -> Path:
    """Where the environment keeps its packages."""
    return next(folder.glob("lib/python3*/site-packages"))


def _build(folder: Path, requirements: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    # Not compiled ahead: of these thousands of files few are ever imported.
    options = ["--quiet", "--disable-pip-version-check", "--no-compile"]
    _run([str(python_of(folder)), "-m", "pip", "install", *options, "--requirement", str(requirements)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed; delete {ROOT} to start afresh.\n{done.stdout}{done.stderr}")


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Two test runs at once build an environment once."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
