"""How much memory is free and how much is ours, on the device the tensors live on."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        ours = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )  # kept by torch, in use by nobody
        return torch.cuda.mem_get_info(device)[0] + ours
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        facts = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    return 4 * 2**30  # nobody to ask: assume a small laptop


def used_memory(device: torch.device) -> int:
    """Bytes of tensors on a GPU; on a CPU the most this process ever had resident."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
