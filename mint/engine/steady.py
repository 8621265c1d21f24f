"""Rounding that does not depend on company: what a token computes is the same to the last bit whoever else is in the
batch, on the CPU in float32. The contract is docs/determinism.md; this file holds the whole mechanism.

A matrix library picks its kernel, and with it the order of its sums, by the shape of the product. Two rules keep to
shapes in which every row is summed in the same order:

    rows   come in multiples of ROWS: padded with rows that nobody reads;
    keys   of attention come in the widths of `key_slots`: padded with keys that are masked.

Both were measured (MKL 2024.2 through torch 2.13, x86-64 with AVX-512, one and two threads; heads of 8 to 256):

    AMD's    processors: a product of 1 to 3 rows, or with two threads one whose rows are no multiple of 4, is summed in
             another order than a larger one; from 4 rows on all multiples of 4 agree. Sums over 193 to 383 keys are
             split in two halves, wherever those fall, longer ones after every 192.
    Intel's: kernels of up to 15 rows differ from the others, and with two threads wide products differ again, unless
             MKL is asked for its strict mode, in which all numbers of rows agree. Sums over 385 to 767 keys are split
             in halves, longer ones after every 384.

`tests/engine/test_steady.py` says whether they hold on another machine.

Bfloat16 on the CPU is left as it is. On a GPU the sampler's own kernels sum in fixed pieces; its matrix products are
the library's, which splits sums by what fills the card, unless `Device.steady` asks for FIXED_ROWS in each of them.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 4
"""The fewest that agree with more; single rows could use a faster kernel, so every row of padding counts."""
KEYS = 16
FIXED_ROWS = 256
"""On a GPU, if asked for: a product of one shape is summed in one way."""
# Attention on the CPU reads its keys in runs of this many, each with sums of its own...
_RUN = 512
# ...and so many are summed in one go. Part of a run that has more, at most the first number, gets the width of the
# second: its sums are split where those of a whole run are.
_UNSPLIT = 192
_WIDTHS = ((256, 384), (_RUN, _RUN))


def ask_for_strict_sums() -> None:
    """MKL looks when the process multiplies for the first time; a program that has done so before it loads a model sets
    the variable itself. On others' processors the mode was not tried."""
    cpuinfo = Path("/proc/cpuinfo")
    processor = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    if "GenuineIntel" in processor:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def row_multiple(device: torch.device, dtype: torch.dtype) -> int:
    """What numbers of rows are rounded up to: ROWS where the contract holds, 1 elsewhere."""
    return ROWS if device.type == "cpu" and dtype == torch.float32 else 1


def key_slots(keys: int) -> int:
    """The width attention over this many keys is given."""
    runs, rest = divmod(keys, _RUN)
    if rest > _UNSPLIT:
        rest = next(width for most, width in _WIDTHS if rest <= most)
    return runs * _RUN + -(-rest // KEYS) * KEYS


def pad_rows(x: Tensor, multiple: int, dim: int = 0) -> Tensor:
    """Zeros appended along `dim` up to the next multiple."""
    extra = -x.shape[dim] % multiple
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, extra]) if extra else x


def low_rank(out_NO: Tensor, x_NI: Tensor, pair: Sequence[Tensor], scale: float, multiple: int) -> Tensor:
    """out + scale * B(A x) for the rows of one adapter among those of others."""
    count = len(x_NI)
    down, up = (weight.to(x_NI.dtype) for weight in pair)
    padded = torch.addmm(pad_rows(out_NO, multiple), pad_rows(x_NI, multiple) @ down.T, up.T, alpha=scale)
    return padded[:count]
