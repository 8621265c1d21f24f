"""How much memory is free and how much is ours, on the device the tensors live on."""

from __future__ import annotations

import torch

from mint import machine


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type != "cuda":
        return machine.free_memory()
    kept_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # and used by nobody
    return torch.cuda.mem_get_info(device)[0] + kept_by_torch


def used_memory(device: torch.device) -> int:
    """Bytes of tensors on a GPU; on a CPU what this process has resident."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else machine.process_memory()
