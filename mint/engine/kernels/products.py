"""Matrix products of a few rows: a matter of reading the weights once, as early as possible.

Every program reads its piece of the weights before it waits for the rows (`overlap.follow`), so that they are on their
way while the kernel before is still busy. The sums over the inputs are split to have enough programs; whatever kernel
reads the product adds the parts up (`rows.Product`). For more rows the library's products are faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.kernels.overlap import follow, overlapping

MOST_ROWS = 64
# Outputs and inputs of one program: of eight shapes tried on an H200 the best for 16 and 32 rows, and for 64.
_SHAPE, _SHAPE_64 = (32, 512), (64, 256)


@triton.jit
def _few_rows_kernel(
    x_ptr, weight_ptr, out_ptr, outputs, inputs, rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.program_id(1) * PART + tl.arange(0, PART)
    row = tl.arange(0, ROWS)
    mask = (column < outputs)[None, :]
    weight = tl.load(
        weight_ptr + column[None, :].to(tl.int64) * inputs + k[:, None], mask=mask & (k < inputs)[:, None], other=0.0
    )
    follow(OVERLAPS)
    inside = (row < rows)[:, None]
    x = tl.load(x_ptr + row[:, None] * inputs + k[None, :], mask=inside & (k < inputs)[None, :], other=0.0)
    place = out_ptr + (tl.program_id(1) * rows + row[:, None]) * outputs + column[None, :]
    tl.store(place, tl.dot(x, weight, input_precision="ieee"), mask=inside & mask)


def few_rows(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W' as parts to be added up, [splits, N, O] in float32; N is MOST_ROWS at most."""
    (rows, inputs), outputs = x_NI.shape, len(weight_OI)
    columns, part = _SHAPE if rows <= 32 else _SHAPE_64
    splits = triton.cdiv(inputs, part)
    out = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x_NI.device)
    _few_rows_kernel[(triton.cdiv(outputs, columns), splits)](
        x_NI, weight_OI, out, outputs, inputs, rows, ROWS=triton.next_power_of_2(rows), COLUMNS=columns, PART=part,
        num_warps=4, **overlapping(x_NI.device),
    )  # fmt: skip
    return out
