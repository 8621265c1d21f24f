"""What is where: an adapter's tensors (`Holding`), and how much of them the device and host memory may have (`Room`).

`mint.engine.residence` moves them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from mint.engine.memory import free_memory
from mint.engine.spill import SpilledFile

if TYPE_CHECKING:
    from mint.engine.residence import Pin

SHARE = 0.25
"""Of the memory that is free once a base model is loaded: what adapters may take of it, unless told otherwise. The
rest is for activations, and on a CPU for the sampler's cache and for the user."""


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Room:
    """How much may be where; None: no limit. Without host memory, adapters go from the device straight to disk: on a
    CPU, where the two are the same memory."""

    device_adapters: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = 0

    @classmethod
    def measured(cls, device: torch.device, adapters: int | None = None) -> Room:
        """A share of what is free now; `adapters` limits their number besides."""
        host = 0 if device.type == "cpu" else int(SHARE * free_memory(torch.device("cpu")))
        return cls(adapters, int(SHARE * free_memory(device)), host)

    def takes_one_more(self, sizes: Sequence[int], more: int) -> bool:
        """Whether an adapter of `more` bytes may join those of these sizes on the device. One that is larger than the
        whole room is served alone."""
        if not sizes:
            return True
        if self.device_adapters is not None and len(sizes) >= self.device_adapters:
            return False
        return self.device_bytes is None or sum(sizes) + more <= self.device_bytes

    def is_exceeded(self, sizes: Sequence[int]) -> bool:
        """Whether adapters of these sizes are too many for the device; one alone never is for its size."""
        if self.device_adapters is not None and len(sizes) > self.device_adapters:
            return True
        return self.device_bytes is not None and len(sizes) > 1 and sum(sizes) > self.device_bytes


class Owner(Protocol):
    """Something whose tensors can be moved."""

    frozen: bool
    """Its tensors never change, so that a copy of them stays true."""

    def tensors(self) -> list[Tensor]:
        """All that its work depends on, always in the same order."""
        ...

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Replaces them, as many as `tensors` gave."""
        ...

    def leave_device(self) -> None:
        """Called before its tensors are taken away: what was derived from them must go too."""
        ...


class Stored(Protocol):
    """A copy on disk."""

    def read(self) -> list[Tensor]: ...


@dataclass(eq=False)
class Holding:
    """One adapter's tensors, wherever they are."""

    owner: Owner
    devices: list[torch.device] = field(default_factory=list)
    tier: Tier = Tier.DEVICE
    pins: int = 0
    used: float = field(default_factory=time.monotonic)
    bytes: int = 0
    stored: Stored | None = None
    """A copy on disk of what it holds now."""
    spilled: SpilledFile | None = None
    epoch: int = 0
    """Counts the times it was pinned: a file written meanwhile is no copy of it."""
    writing: bool = False
    arriving: bool = False
    gone: bool = False
    waiting: list[Future[Pin]] = field(default_factory=list)
    since: float = 0.0

    @property
    def takes_place(self) -> bool:
        """On the device, now or soon."""
        return self.tier is Tier.DEVICE or self.arriving
