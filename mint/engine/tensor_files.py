"""Named tensors as one safetensors file, there and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """On the CPU, in memory of their own. Mapped into memory, as safetensors reads files, one that is replaced
    or deleted keeps its place on the disk as long as a tensor lives, and safetensors 0.8.0 never frees two Python
    integers a tensor: an engine that brings adapters back from disk all day would grow without end."""
    return load(path.read_bytes())
