"""How much memory is free and how much is ours, on the device the tensors live on; and who can give some back."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

import torch

from mint import machine


class Reserve(Protocol):
    """Memory of a GPU that torch keeps for one purpose alone, so that nobody else can have it."""

    device: torch.device

    @property
    def bytes(self) -> int: ...

    def give_back(self) -> bool:
        """Whether there was anything."""
        ...


_reserves: WeakSet[Reserve] = WeakSet()


def register(reserve: Reserve) -> None:
    _reserves.add(reserve)


def give_back_reserves() -> None:
    """For want of memory."""
    for reserve in list(_reserves):
        reserve.give_back()


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type != "cuda":
        return machine.free_memory()
    kept_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # and used by nobody
    reserved = sum(reserve.bytes for reserve in list(_reserves) if reserve.device == device)
    return max(0, torch.cuda.mem_get_info(device)[0] + kept_by_torch - reserved)


def used_memory(device: torch.device) -> int:
    """Bytes of tensors on a GPU; on a CPU what this process has resident."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else machine.process_memory()
