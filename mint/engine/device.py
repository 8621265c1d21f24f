"""Where the tensors live and in which number format, each chosen once and stored with its reason.

Nothing here knows a model; what depends on one (threads) takes the figure it needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

# Below this width a matrix product is over before a second thread has woken up: on a busy two-core machine two threads
# were measured up to twenty times slower than one.
NARROW_MODEL = 512


@dataclass(frozen=True)
class Device:
    torch_device: torch.device
    dtype: torch.dtype
    """Of the base weights and activations; adapters train in float32 whatever this is."""
    reason: str
    steady: bool = False
    """On a GPU: no sample depends on its company, at some cost (docs/determinism.md). On the CPU none ever does."""
    bfloat16_products: bool = False
    """On a CPU: weights, and what they are multiplied with, are rounded to bfloat16; all else is `dtype`. On a GPU
    everything is bfloat16 anyway."""


@dataclass(frozen=True)
class Threads:
    count: int
    reason: str


def pick_device(steady: bool = False, bfloat16_products: bool = False) -> Device:
    if torch.cuda.is_available():
        reason = f"CUDA is available ({torch.cuda.get_device_name()}); bfloat16 is its fast format with float32's range"
        return Device(torch.device("cuda"), torch.bfloat16, reason, steady)
    reason = "no CUDA device; CPUs compute float32 at full speed, and exact sampler/trainer agreement needs it"
    return Device(torch.device("cpu"), torch.float32, reason, steady, bfloat16_products)


def wait_for_gpu() -> None:
    """Until it has done all that it was given; at once where none is used."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def choose_threads(hidden_size: int) -> Threads:
    """How many CPU threads torch should use for a model of this width; OMP_NUM_THREADS has the last word."""
    if asked := os.environ.get("OMP_NUM_THREADS"):
        return Threads(torch.get_num_threads(), f"OMP_NUM_THREADS={asked}")
    if hidden_size < NARROW_MODEL:
        return Threads(1, f"hidden size {hidden_size} < {NARROW_MODEL}: starting threads costs more than they save")
    cores = _physical_cores()
    return Threads(cores, f"hidden size {hidden_size} >= {NARROW_MODEL}: one thread for each of {cores} physical cores")


class Cores:
    """The cores of a CPU, lent to whoever computes side by side: what nobody else has at the moment, at least one.

    Only to those whose results do not depend on how many they get.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lent = 0
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, most: int | None = None) -> Iterator[int]:
        with self._lock:
            free = max(1, self.count - self._lent)
            got = free if most is None else min(free, most)
            self._lent += got
        try:
            yield got
        finally:
            with self._lock:
                self._lent -= got


@cache
def cores() -> Cores:
    """Those of this process; OMP_NUM_THREADS has the last word."""
    asked = os.environ.get("OMP_NUM_THREADS")
    return Cores(int(asked) if asked and asked.isdecimal() and int(asked) else _physical_cores())


def _physical_cores() -> int:
    # torch's default is one thread per physical core, but it does not know of an affinity mask.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_TORCH_DEFAULT_THREADS, allowed))


_TORCH_DEFAULT_THREADS = torch.get_num_threads()
