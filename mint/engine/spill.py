"""A folder for tensors that have left memory: each file checked when it is read, all of them gone with the engine.

What lies here is of use to one engine alone: after its death the journal brings adapters back, not these files. So
nothing is flushed, and the next engine that starts on the same folder removes what a killed one left.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from mint.engine.folders import sha256
from mint.engine.tensor_files import read_tensors, write_tensors
from mint.errors import Lost

_LOCK = "lock"


@dataclass(frozen=True)
class SpilledFile:
    """Tensors on disk, in the order they were given."""

    path: Path
    digest: str
    count: int

    def read(self) -> list[Tensor]:
        """On the CPU. A file that is not what was written is named, never loaded."""
        try:
            if sha256(self.path) != self.digest:
                raise Lost(f"{self.path} is damaged: it does not match its SHA-256. The adapter is made anew.")
            tensors = read_tensors(self.path)
        except (OSError, SafetensorError) as error:
            raise Lost(f"{self.path} cannot be read ({error}). The adapter is made anew.") from error
        return [tensors[_name(n)] for n in range(self.count)]

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


class Spill:
    def __init__(self, root: Path | None = None) -> None:
        """Under `root` if given, which engines may share; else in the system's folder of temporary files."""
        root = root or Path(tempfile.gettempdir()) / "mint-spill"
        root.mkdir(parents=True, exist_ok=True)
        for left in root.iterdir():
            if (lock := _try_lock(left)) is not None:  # its engine did not get to remove it
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        self.folder = root / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir()
        self._lock = _try_lock(self.folder)
        self._numbers = itertools.count()

    def write(self, tensors: Sequence[Tensor]) -> SpilledFile:
        """From any thread. Fails with OSError when there is no room."""
        path = self.folder / f"{next(self._numbers):06d}.safetensors"
        try:
            write_tensors(path, {_name(n): tensor for n, tensor in enumerate(tensors)})
            return SpilledFile(path, sha256(path), len(tensors))
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise OSError(f"{path} could not be written: {error}") from error

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def placeholder(tensor: Tensor) -> Tensor:
    """Stands where a tensor was: any use of it fails. One for all of a kind, as there can be thousands of adapters."""
    return _placeholder(tensor.dtype, tensor.requires_grad)


@cache
def _placeholder(dtype: torch.dtype, requires_grad: bool) -> Tensor:
    return torch.empty(0, dtype=dtype, requires_grad=requires_grad)


def _name(number: int) -> str:
    return f"{number:05d}"


def _try_lock(folder: Path) -> int | None:
    """An open file that holds the folder's lock until it is closed, or the process ends in any way."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # not a folder, or removed in the meantime
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
