"""Where the tensors live and in which number format, each chosen once and stored with its reason.

Nothing here knows a model; what depends on one (threads) takes the figure it needs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Threads:
    count: int
    reason: str


def pick_device(steady: bool = False) -> Device:
    if torch.cuda.is_available():
        reason = f"CUDA is available ({torch.cuda.get_device_name()}); bfloat16 is its fast format with float32's range"
        return Device(torch.device("cuda"), torch.bfloat16, reason, steady)
    reason = "no CUDA device; CPUs compute float32 at full speed, and exact sampler/trainer agreement needs it"
    return Device(torch.device("cpu"), torch.float32, reason, steady)


def choose_threads(hidden_size: int) -> Threads:
    """How many CPU threads torch should use for a model of this width; OMP_NUM_THREADS has the last word."""
    if asked := os.environ.get("OMP_NUM_THREADS"):
        return Threads(torch.get_num_threads(), f"OMP_NUM_THREADS={asked}")
    if hidden_size < NARROW_MODEL:
        return Threads(1, f"hidden size {hidden_size} < {NARROW_MODEL}: starting threads costs more than they save")
    cores = _physical_cores()
    return Threads(cores, f"hidden size {hidden_size} >= {NARROW_MODEL}: one thread for each of {cores} physical cores")


def _physical_cores() -> int:
    # torch's default is one thread per physical core, but it does not know of an affinity mask.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_TORCH_DEFAULT_THREADS, allowed))


_TORCH_DEFAULT_THREADS = torch.get_num_threads()
