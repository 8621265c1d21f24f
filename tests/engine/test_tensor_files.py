import gc
import sys
from pathlib import Path

import torch
from safetensors.torch import save

from mint.engine.tensor_files import DTYPES, read_tensors, write_tensors

NAMES = [f"{n:03d}" for n in range(100)]


def test_reading_a_file_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_tensors(file, {name: torch.randn(2, 3) for name in NAMES})

    def blocks_after(times: int) -> int:
        for _ in range(times):
            read_tensors(file)
        gc.collect()
        return sys.getallocatedblocks()

    before = blocks_after(20)
    assert blocks_after(50) - before < 50 * len(NAMES) / 2, "less than half an object a tensor: nothing is kept"


def test_what_was_read_is_independent_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    first = torch.arange(6.0).reshape(2, 3)
    write_tensors(file, {"x": first})
    read = read_tensors(file)["x"]
    write_tensors(file, {"x": first + 1})
    file.unlink()
    assert torch.equal(read, first)
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_the_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    file, turned = tmp_path / "a.safetensors", torch.arange(12.0).reshape(3, 4).T
    tensors = {f"of {dtype}, é": torch.arange(5).to(dtype) for dtype in DTYPES}
    tensors |= {"turned": turned, "b": turned[1:2], "none": torch.zeros(0, 3), "number": torch.tensor(7)}
    for metadata in (None, {"format": "pt"}):
        write_tensors(file, tensors, metadata)
        assert file.read_bytes() == save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
        assert all(torch.equal(found, tensors[name]) for name, found in read_tensors(file).items())
