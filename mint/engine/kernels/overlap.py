"""Kernels that start while the one before them ends (programmatic dependent launch, from Hopper on).

A kernel calls `follow` before it touches what the kernel just before it reads or writes. A kernel begins when all of
its predecessor's programs have got that far, and so everything before the predecessor is over: what was written there,
and weights, it may load at once. Every program must call it, those with nothing to do as well: a kernel that ended
without having waited would let its successor run ahead of its predecessor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Waits for the kernel before to be over, its results in memory; then the next one may begin."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def _overlaps(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None  # AMD's cards count otherwise
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(device: torch.device) -> dict[str, Any]:
    """The options of a launch of a kernel that calls `follow`."""
    return {"OVERLAPS": True, "launch_pdl": True} if _overlaps(device) else {"OVERLAPS": False}
