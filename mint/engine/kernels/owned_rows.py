"""Low-rank products of rows that belong to several adapters, for training: what each adapter adds to its own rows, and
the gradients of both of its matrices from them.

Rows of one adapter lie together, those of the first adapter first: `owner_T` says whose each is, `starts` where each
adapter's begin. A tile of rows that belongs to several takes each of them in turn and keeps what it finds for the rows
of each, so nothing has to be aligned, and a number that is not finite, in a row or in a matrix, stays where it belongs.

Linears that are computed as one product (`mint.engine.layers.TOGETHER`) stand side by side in its outputs: `sizes` are
their widths, z has one after the other what each adapter's first matrix makes of the inputs for them.

Shapes: T rows, G adapters, I inputs, O outputs of all linears together, r rank, R ranks of all linears together, V
either of I and O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that fill the card; where there are fewer, sums are split, into so many parts at most.
_ENOUGH, _MOST_SPLITS, _MOST_STRIPES = 256, 32, 16
# Ranks of all linears together that one program takes: beyond, one for each linear, which read the inputs again.
_MOST_TOGETHER = 64
# From so many numbers on the larger tiles.
_MANY = 2**22
# Rows, inputs of one step, warps, stages of loading ahead.
_SHRINK_FEW, _SHRINK_MANY = (16, 128, 4, 3), (64, 128, 4, 3)
# Rows, columns, warps.
_ADD_FEW, _ADD_MANY = (16, 128, 4), (64, 128, 4)
# Rows of one step, columns, warps, stages.
_SUMS = (64, 128, 4, 3)


@triton.jit
def _part_of(block, BLOCKS_1: tl.constexpr, BLOCKS_2: tl.constexpr):
    """Which linear a block of columns belongs to."""
    return (block >= BLOCKS_1).to(tl.int32) + (block >= BLOCKS_2).to(tl.int32)


@triton.jit
def _of_part(part, first: tl.constexpr, second: tl.constexpr, third: tl.constexpr):
    return tl.where(part == 0, first, tl.where(part == 1, second, third))


@triton.jit
def _owners(owner_ptr, first_row, rows, ROWS: tl.constexpr):
    """The first and the last of a tile's."""
    return tl.load(owner_ptr + first_row), tl.load(owner_ptr + tl.minimum(first_row + ROWS, rows) - 1)


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    x_ptr, x_row, a_ptr, z_ptr, owner_ptr, rows, per_split, A_OWNER: tl.constexpr, A_INPUT: tl.constexpr,
    A_RANK: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr, END_1: tl.constexpr, END_2: tl.constexpr,
    END_3: tl.constexpr, LINEARS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    part, split = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, BLOCK_R)
    low, high = 0, END_3
    if APART:  # each linear has inputs of its own
        low, high = _of_part(part, 0, END_1, END_2), _of_part(part, END_1, END_2, END_3)
    low += split * per_split
    high = tl.minimum(high, low + per_split)
    owner = tl.load(owner_ptr + row, mask=row < rows, other=-1)
    first, last = _owners(owner_ptr, tl.program_id(0) * ROWS, rows, ROWS)
    acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
    for adapter in range(first, last + 1):
        mine = (owner == adapter)[:, None]
        a_at = a_ptr + tl.cast(adapter, tl.int64) * A_OWNER
        if not APART:
            a_at += part * WIDTH * A_RANK
        found = tl.zeros([ROWS, BLOCK_R], tl.float32)
        for start in range(low, high, STEP):
            k = start + tl.arange(0, STEP)
            x_at = x_ptr + row[:, None].to(tl.int64) * x_row + k[None, :]
            x = tl.load(x_at, mask=mine & (k < high)[None, :], other=0.0)
            a = tl.load(
                a_at + k[:, None].to(tl.int64) * A_INPUT + r[None, :] * A_RANK,
                mask=(k < high)[:, None] & (r < WIDTH)[None, :], other=0.0,
            )  # fmt: skip
            found = tl.dot(x, a, found)
        acc = tl.where(mine, found, acc)
    at = z_ptr + (split * rows + row[:, None]).to(tl.int64) * (LINEARS * WIDTH) + part * WIDTH + r[None, :]
    tl.store(at, acc.to(z_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (r < WIDTH)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add_kernel(
    x_ptr, z_ptr, b_ptr, out_ptr, owner_ptr, rows, B_OWNER: tl.constexpr, B_OUTPUT: tl.constexpr, B_RANK: tl.constexpr,
    Z: tl.constexpr, WIDTH: tl.constexpr, END_1: tl.constexpr, END_2: tl.constexpr, END_3: tl.constexpr,
    BLOCKS_1: tl.constexpr, BLOCKS_2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    part = _part_of(block, BLOCKS_1, BLOCKS_2)
    column = _of_part(part, 0, END_1, END_2) + (block - _of_part(part, 0, BLOCKS_1, BLOCKS_2)) * COLUMNS
    column += tl.arange(0, COLUMNS)
    inside = (column < _of_part(part, END_1, END_2, END_3))[None, :]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, BLOCK_R)
    mask = (row < rows)[:, None] & inside
    at = row[:, None].to(tl.int64) * END_3 + column[None, :]
    acc = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    owner = tl.load(owner_ptr + row, mask=row < rows, other=-1)
    first, last = _owners(owner_ptr, tl.program_id(1) * ROWS, rows, ROWS)
    for adapter in range(first, last + 1):
        mine = (owner == adapter)[:, None]
        z_at = z_ptr + row[:, None].to(tl.int64) * Z + part * WIDTH + r[None, :]
        z = tl.load(z_at, mask=mine & (r < WIDTH)[None, :], other=0.0)
        b_at = b_ptr + tl.cast(adapter, tl.int64) * B_OWNER
        b = tl.load(
            b_at + column[None, :].to(tl.int64) * B_OUTPUT + r[:, None] * B_RANK, mask=(r < WIDTH)[:, None] & inside,
            other=0.0,
        )  # fmt: skip
        acc = tl.where(mine, tl.dot(z, b, acc), acc)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sums_kernel(
    x_ptr, x_row, z_ptr, z_row, out_ptr, starts_ptr, adapters, OUT_OWNER: tl.constexpr, OUT_COLUMN: tl.constexpr,
    OUT_RANK: tl.constexpr, WIDTH: tl.constexpr, END_1: tl.constexpr, END_2: tl.constexpr, END_3: tl.constexpr,
    BLOCKS_1: tl.constexpr, BLOCKS_2: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_R: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    block, adapter, stripe = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part = _part_of(block, BLOCKS_1, BLOCKS_2)
    column = _of_part(part, 0, END_1, END_2) + (block - _of_part(part, 0, BLOCKS_1, BLOCKS_2)) * COLUMNS
    column += tl.arange(0, COLUMNS)
    inside = (column < _of_part(part, END_1, END_2, END_3))[None, :]
    r = tl.arange(0, BLOCK_R)
    low, high = tl.load(starts_ptr + adapter), tl.load(starts_ptr + adapter + 1)
    per = tl.cdiv(tl.cdiv(high - low, tl.num_programs(2)), ROWS) * ROWS
    low += stripe * per
    high = tl.minimum(high, low + per)
    acc = tl.zeros([COLUMNS, BLOCK_R], tl.float32)
    for start in range(low, high, ROWS):
        row = start + tl.arange(0, ROWS)
        mine = (row < high)[:, None]
        x = tl.load(x_ptr + row[:, None].to(tl.int64) * x_row + column[None, :], mask=mine & inside, other=0.0)
        z_at = z_ptr + row[:, None].to(tl.int64) * z_row + part * WIDTH + r[None, :]
        z = tl.load(z_at, mask=mine & (r < WIDTH)[None, :], other=0.0)
        acc = tl.dot(tl.trans(x), z, acc)
    out_ptr += (stripe * adapters + adapter).to(tl.int64) * OUT_OWNER
    at = out_ptr + column[:, None].to(tl.int64) * OUT_COLUMN + r[None, :] * OUT_RANK
    mask = tl.trans(inside) & (r < WIDTH)[None, :]
    if ADDS:
        acc += tl.load(at, mask=mask & (low < high), other=0.0)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask & ((low < high) | (not ADDS)))


@torch.library.custom_op(
    "mint::owned_shrink", mutates_args=(), device_types="cuda",
    schema="(Tensor x_TV, Tensor matrix, Tensor owner_T, int[] sizes, bool apart) -> Tensor",
)  # fmt: skip
def owned_shrink(x_TV: Tensor, matrix: Tensor, owner_T: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    """What matrices make of their adapter's rows, [T, R]. `apart`: of the gradient of the outputs, times B [G, O, r],
    of each linear by its own. Not `apart`: of the inputs that all linears have, times A' of A [G, R, I]."""
    rows, width = x_TV.shape
    total = matrix.shape[2] * len(sizes) if apart else matrix.shape[1]
    linears = len(sizes) if apart or total > _MOST_TOGETHER else 1
    x_TV = x_TV if x_TV.stride(1) == 1 else x_TV.contiguous()
    tile, step, warps, stages = _SHRINK_MANY if x_TV.numel() >= _MANY else _SHRINK_FEW
    tiles = triton.cdiv(rows, tile)
    longest = max(sizes) if apart else width
    splits = min(triton.cdiv(longest, 4 * step), max(1, _ENOUGH // (tiles * linears)), _MOST_SPLITS)
    per_split = triton.cdiv(triton.cdiv(longest, splits), step) * step
    dtype = torch.float32 if splits > 1 else x_TV.dtype
    z = torch.empty(splits, rows, total, dtype=dtype, device=x_TV.device)
    _shrink_kernel[(tiles, linears, splits)](
        x_TV, x_TV.stride(0), matrix, z, owner_T, rows, per_split, *_strides(matrix, apart), WIDTH=total // linears,
        APART=apart, LINEARS=linears, ROWS=tile, STEP=step, BLOCK_R=_block_r(total // linears), num_warps=warps,
        num_stages=stages, **_ends(sizes if apart else [width]),
    )  # fmt: skip
    return z[0] if splits == 1 else z.sum(0).to(x_TV.dtype)


@owned_shrink.register_fake
def _(x_TV: Tensor, matrix: Tensor, owner_T: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    return x_TV.new_empty(x_TV.shape[0], matrix.shape[2] * len(sizes) if apart else matrix.shape[1])


@torch.library.custom_op(
    "mint::owned_add", mutates_args=(), device_types="cuda",
    schema="(Tensor x_TV, Tensor z_TR, Tensor matrix, Tensor owner_T, int[] sizes, bool apart) -> Tensor",
)  # fmt: skip
def owned_add(x_TV: Tensor, z_TR: Tensor, matrix: Tensor, owner_T: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    """x plus z times each adapter's matrix. `apart`: B' of B [G, O, r], each linear by its own part of z. Not `apart`:
    A [G, R, I]."""
    out = torch.empty_like(x_TV, memory_format=torch.contiguous_format)
    _add(out, x_TV.contiguous(), z_TR, matrix, owner_T, sizes, apart)
    return out


@torch.library.custom_op(
    "mint::owned_add_", mutates_args=("x_TV",), device_types="cuda",
    schema="(Tensor(a!) x_TV, Tensor z_TR, Tensor matrix, Tensor owner_T, int[] sizes, bool apart) -> ()",
)  # fmt: skip
def owned_add_(x_TV: Tensor, z_TR: Tensor, matrix: Tensor, owner_T: Tensor, sizes: Sequence[int], apart: bool) -> None:
    """The same in the place of x."""
    _add(x_TV, x_TV, z_TR, matrix, owner_T, sizes, apart)


def _add(
    out: Tensor, x_TV: Tensor, z_TR: Tensor, matrix: Tensor, owner_T: Tensor, sizes: Sequence[int], apart: bool
) -> None:
    rows, width = len(x_TV), matrix.shape[2 if apart else 1]
    tile, columns, warps = _ADD_MANY if x_TV.numel() >= _MANY else _ADD_FEW
    z_TR = z_TR.contiguous()
    parts = sizes if apart else [x_TV.shape[1]]
    blocks, firsts = _blocks(parts, columns)
    _add_kernel[(blocks, triton.cdiv(rows, tile))](
        x_TV, z_TR, matrix, out, owner_T, rows, *_strides(matrix, apart), Z=z_TR.shape[1], WIDTH=width, ROWS=tile,
        COLUMNS=columns, BLOCK_R=_block_r(width), num_warps=warps, num_stages=1, **firsts, **_ends(parts),
    )  # fmt: skip


@owned_add.register_fake
def _(x_TV: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x_TV, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "mint::owned_sums", mutates_args=(), device_types="cuda",
    schema="(Tensor x_TV, Tensor z_TR, Tensor starts, int[] sizes, bool apart) -> Tensor",
)  # fmt: skip
def owned_sums(x_TV: Tensor, z_TR: Tensor, starts: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    """Gradients of each adapter's matrices. `apart`: of B, [G, O, r], from the gradient of the outputs and z. Not
    `apart`: of A, [G, R, I], from the inputs and the gradient of z."""
    adapters, inputs, width = len(starts) - 1, x_TV.shape[1], z_TR.shape[1] // (len(sizes) if apart else 1)
    stripes = max(1, min(_MOST_STRIPES, triton.cdiv(_ENOUGH, adapters * triton.cdiv(inputs, _SUMS[1]))))
    shape = (adapters, inputs, width) if apart else (adapters, width, inputs)
    out = x_TV.new_empty(stripes, *shape, dtype=torch.float32 if stripes > 1 else x_TV.dtype)
    _put_sums(out, x_TV, z_TR, starts, sizes, apart, adds=False)
    return out[0] if stripes == 1 else out.sum(0).to(x_TV.dtype)


@owned_sums.register_fake
def _(x_TV: Tensor, z_TR: Tensor, starts: Tensor, sizes: Sequence[int], apart: bool) -> Tensor:
    adapters, inputs = starts.shape[0] - 1, x_TV.shape[1]
    if apart:
        return x_TV.new_empty(adapters, inputs, z_TR.shape[1] // len(sizes))
    return x_TV.new_empty(adapters, z_TR.shape[1], inputs)


@torch.library.custom_op(
    "mint::owned_sums_", mutates_args=("total",), device_types="cuda",
    schema="(Tensor(a!) total, Tensor x_TV, Tensor z_TR, Tensor starts) -> ()",
)  # fmt: skip
def owned_sums_(total: Tensor, x_TV: Tensor, z_TR: Tensor, starts: Tensor) -> None:
    """Adds the gradients of B of one linear to a total [G, O, r] in float32; adapters without rows cost nothing."""
    _put_sums(total[None], x_TV, z_TR, starts, [x_TV.shape[1]], apart=True, adds=True)


def _put_sums(
    out: Tensor, x_TV: Tensor, z_TR: Tensor, starts: Tensor, sizes: Sequence[int], apart: bool, adds: bool
) -> None:
    """`out`: one total for each stripe of the rows."""
    x_TV, z_TR = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (x_TV, z_TR))
    step, columns, warps, stages = _SUMS
    parts = sizes if apart else [x_TV.shape[1]]
    blocks, firsts = _blocks(parts, columns)
    width = out.shape[3 if apart else 2]
    _sums_kernel[(blocks, out.shape[1], len(out))](
        x_TV, x_TV.stride(0), z_TR, z_TR.stride(0), out, starts, out.shape[1], *_strides(out[0], apart), WIDTH=width,
        ROWS=step, COLUMNS=columns, BLOCK_R=_block_r(width), ADDS=adds, num_warps=warps, num_stages=stages, **firsts,
        **_ends(parts),
    )  # fmt: skip


def _strides(matrix: Tensor, apart: bool) -> tuple[int, int, int]:
    """Of adapters, of inputs or outputs, and of ranks."""
    return matrix.stride(0), matrix.stride(1 if apart else 2), matrix.stride(2 if apart else 1)


def _ends(sizes: Sequence[int]) -> dict[str, int]:
    """Where each linear ends."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return dict(zip(("END_1", "END_2", "END_3"), (*ends, ends[-1], ends[-1]), strict=False))


def _blocks(sizes: Sequence[int], columns: int) -> tuple[int, dict[str, int]]:
    """How many blocks of columns there are, and where those of the second and of the third linear begin."""
    counts = [triton.cdiv(size, columns) for size in sizes]
    return sum(counts), {"BLOCKS_1": counts[0], "BLOCKS_2": sum(counts[:2])}


def _block_r(width: int) -> int:
    return max(16, triton.next_power_of_2(width))
