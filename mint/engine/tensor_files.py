"""Named tensors as one safetensors file, there and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

# As the format names them, in the order in which it lays tensors out: each at a multiple of its numbers' size.
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """The bytes that safetensors writes, without its two looks at who shares memory with whom: a snapshot of some
    hundred small tensors takes a third of the time."""
    places = list(DTYPES)
    order = sorted(tensors, key=lambda name: (places.index(tensors[name].dtype), name))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    described = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    described += b" " * (-len(described) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for name in order:
            file.write(_bytes_of(tensors[name]))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """On the CPU, in memory of their own. Mapped into memory, as safetensors reads files, one that is replaced
    or deleted keeps its place on the disk as long as a tensor lives, and safetensors 0.8.0 never frees two Python
    integers a tensor: an engine that brings adapters back from disk all day would grow without end."""
    return load(path.read_bytes())
