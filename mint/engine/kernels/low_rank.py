"""The low-rank products of many adapters in one batch.

Rows stand in tiles of TILE, and all rows of a tile use one adapter: `slot_of_tile` names its line in the tables of
`mint.engine.sampler.slots`, which hold the addresses of A and of B' (turned, so that neighbouring outputs lie side by
side), ranks and scales. So a kernel takes adapters of any rank, and a recorded graph stays valid when they change. Line
0 is the base model, of rank 0.

A low-rank product has two halves. The first, y = x A' for all linears of a projection, is either part of the matrix
product, where A stands below the weights, or computed by `shrink`, split along the inputs into parts (`y` [splits,
rows, linears, rank], any strides), which the second half adds up in order; that half, y B' times the scale, is part of
whatever kernel reads the projection's output next (`expanded`). Where B stands beside the weights, both halves are part
of the matrix product, of rows that have y beside them (`widened`). Many rows are not split, unless they are asked to be
steady: then nothing depends on the number of rows, and a row computes the same bits in any company.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.kernels.overlap import follow, overlapping

TILE = 16
# From here on the card is full without splitting sums.
_MANY_ROWS = 2048
# Ranks are read in steps of this many, the least a matrix unit takes.
RANK_STEP = tl.constexpr(16)
# Arguments that differ from layer to layer or step to step: no new code for a value that happens to be round.
VARYING = ["first_linear", "linear_number", "rows"]


class Tables:
    """What kernels know of the adapters: see `mint.engine.sampler.slots`, which fills it."""

    def __init__(self, lines: int, linears: int, rank_cap: int, device: torch.device) -> None:
        self.linears = linears
        self.rank_cap = rank_cap
        """At least the largest rank, in whole steps."""
        self.a, self.b = (torch.zeros(lines, linears, dtype=torch.int64, device=device) for _ in range(2))
        self.rank = torch.zeros(lines, linears, dtype=torch.int32, device=device)
        self.scale = torch.zeros(lines, dtype=torch.float32, device=device)

    @property
    def lines(self) -> int:
        return len(self.scale)


@dataclass(frozen=True)
class Adapters:
    """Which adapters the rows of a pass have."""

    tables: Tables
    slot_of_tile: Tensor
    """Each tile's line in the tables."""
    dtype: torch.dtype
    """Of activations and adapters."""
    steady: bool = False

    def splits(self, inputs: int, rows: int) -> tuple[int, int]:
        """Into how many parts `shrink` splits its sums, and how long each is."""
        if not self.few(rows):
            return 1, -(-inputs // 128) * 128
        part = 256 if inputs <= 2048 else -(-inputs // 1024) * 128
        return -(-inputs // part), part

    def few(self, rows: int) -> bool:
        """So few that every program counts; or they are treated as if they were."""
        return rows < _MANY_ROWS or self.steady


@triton.jit(do_not_specialize=VARYING)
def _shrink_kernel(
    x_ptr, y_ptr, slot_of_tile, a_table, rank_table, table_width, first_linear, inputs, rows, linears, rank_cap,
    PART: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    tile, split, cell = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    steps = rank_cap // RANK_STEP
    linear, rank_start = cell // steps, (cell % steps) * RANK_STEP
    entry = tl.load(slot_of_tile + tile).to(tl.int64) * table_width + first_linear + linear
    rank = tl.load(rank_table + entry)
    if rank_start < rank:
        dtype = x_ptr.dtype.element_ty
        a_ptr = tl.multiple_of(tl.load(a_table + entry).to(tl.pointer_type(dtype)), 16)
        row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        r = rank_start + tl.arange(0, RANK_STEP)
        acc = tl.zeros([TILE_ROWS, RANK_STEP], dtype=tl.float32)
        for start in range(0, PART, STEP):
            k = split * PART + start + tl.arange(0, STEP)
            x = tl.load(x_ptr + row[:, None].to(tl.int64) * inputs + k[None, :], mask=(k < inputs)[None, :], other=0.0)
            a = tl.load(
                a_ptr + r[None, :] * inputs + k[:, None], mask=(k < inputs)[:, None] & (r < rank)[None, :], other=0.0
            )
            acc += tl.dot(x, a, input_precision="ieee")
        place = ((split * rows + row[:, None]).to(tl.int64) * linears + linear) * rank_cap + r[None, :]
        tl.store(y_ptr + place, acc)


@triton.jit
def adapter_at(slot, number, b_table, rank_table, scale_table, table_width, like_ptr):
    """Rank, scale and the address of B' of the linear `number` in a line of the tables."""
    entry = slot * table_width + number
    b_ptr = tl.multiple_of(tl.load(b_table + entry).to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
    return tl.load(rank_table + entry), tl.load(scale_table + slot), b_ptr


@triton.jit
def b_step(b_ptr, start, rank, column, outputs, STEP: tl.constexpr):
    """B' of one step of ranks at some columns, [STEP, columns]."""
    r = start + tl.arange(0, STEP)
    mask = (r < rank)[:, None] & (column < outputs)[None, :]
    return tl.load(b_ptr + r[:, None] * outputs + column[None, :], mask=mask, other=0.0)


@triton.jit
def y_step(y_ptr, y_split, y_row, start, rank, row, SPLITS: tl.constexpr):
    """y of one step of ranks for some rows, added up, [rows, RANK_STEP] in float32."""
    r = start + tl.arange(0, RANK_STEP)
    place, mask = row[:, None].to(tl.int64) * y_row + r[None, :], (r < rank)[None, :]
    y = tl.load(y_ptr + place, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        y += tl.load(y_ptr + split * y_split + place, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def expanded(
    y_ptr, y_split, y_row, rank, scale, b_ptr, first_y, first_b, row, column, outputs,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The low-rank product of the rows of a tile at the columns of one linear, [ROWS, COLUMNS] in float32. `first_y`,
    `first_b`: `y_step` and `b_step` of the first ranks, loaded before."""
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    if rank > 0:
        acc = tl.dot(first_y.to(first_b.dtype), first_b, input_precision="ieee")
        for start in range(RANK_STEP, rank, RANK_STEP):
            b = b_step(b_ptr, start, rank, column, outputs, RANK_STEP)
            y = y_step(y_ptr, y_split, y_row, start, rank, row, SPLITS)
            acc += tl.dot(y.to(b.dtype), b, input_precision="ieee")
    return acc * scale


@triton.jit(do_not_specialize=VARYING)
def _widen_kernel(
    x_ptr, y_ptr, y_split, y_row, out_ptr, slot_of_tile, rank_table, scale_table, table_width, linear_number, inputs,
    room, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    rank, scale = tl.load(rank_table + slot * table_width + linear_number), tl.load(scale_table + slot)
    row = (tile * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None].to(tl.int64)
    follow(OVERLAPS)
    x = tl.load(x_ptr + row * inputs + column[None, :], mask=(column < inputs)[None, :], other=0.0)
    r = column - inputs
    mask = ((r >= 0) & (r < rank))[None, :]
    y = tl.zeros([TILE_ROWS, COLUMNS], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(y_ptr + split * y_split + row * y_row + r[None, :], mask=mask, other=0.0)
    wide = tl.where((column < inputs)[None, :], x, (y * scale).to(x.dtype))
    tl.store(out_ptr + row * (inputs + room) + column[None, :], wide, mask=(column < inputs + room)[None, :])


@triton.jit(do_not_specialize=VARYING)
def _add_kernel(
    out_ptr, out_row, y_ptr, y_split, y_row, slot_of_tile, b_table, rank_table, scale_table, table_width, linear_number,
    outputs, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    rank, scale, b_ptr = adapter_at(slot, linear_number, b_table, rank_table, scale_table, table_width, out_ptr)
    b = b_step(b_ptr, 0, rank, column, outputs, RANK_STEP)
    follow(OVERLAPS)
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    mask = (column < outputs)[None, :]
    place = out_ptr + row[:, None].to(tl.int64) * out_row + column[None, :]
    out = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    y = y_step(y_ptr, y_split, y_row, 0, rank, row, SPLITS)
    out += expanded(y_ptr, y_split, y_row, rank, scale, b_ptr, y, b, row, column, outputs, SPLITS, TILE_ROWS, COLUMNS)
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)


def shrink(x_NI: Tensor, adapters: Adapters, first_linear: int, linears: int) -> Tensor:
    """x A' for the linears `first_linear`..., [splits, N, linears, rank_cap]; what lies beyond a rank, in whole steps,
    is not set."""
    rows, inputs = x_NI.shape
    tables = adapters.tables
    splits, part = adapters.splits(inputs, rows)
    y = torch.empty(splits, rows, linears, tables.rank_cap, dtype=torch.float32, device=x_NI.device)
    grid = (rows // TILE, splits, linears * tables.rank_cap // 16)
    # Not overlapping: it would take its place before the product it runs beside, which then finds no room.
    _shrink_kernel[grid](
        x_NI, y, adapters.slot_of_tile, tables.a, tables.rank, tables.linears, first_linear, inputs, rows, linears,
        tables.rank_cap, PART=part, STEP=128, TILE_ROWS=TILE, num_warps=4,
    )  # fmt: skip
    return y


def widened(x_NI: Tensor, adapters: Adapters, linear: int, room: int) -> Tensor:
    """[x, scale * x A'], as many columns beside x as there is room, zeros beyond a rank."""
    rows, inputs = x_NI.shape
    tables, y = adapters.tables, shrink(x_NI, adapters, linear, 1)
    wide_NX = torch.empty(rows, inputs + room, dtype=x_NI.dtype, device=x_NI.device)
    _widen_kernel[(rows // TILE, triton.cdiv(inputs + room, 256))](
        x_NI, y, *y.stride()[:2], wide_NX, adapters.slot_of_tile, tables.rank, tables.scale, tables.linears, linear,
        inputs, room, SPLITS=len(y), COLUMNS=256, TILE_ROWS=TILE, num_warps=4, **overlapping(x_NI.device),
    )  # fmt: skip
    return wide_NX


def add_low_rank(out_NO: Tensor, y: Tensor, adapters: Adapters, linear: int) -> None:
    """out += scale * y B', in place, for a projection of one linear."""
    rows, outputs = out_NO.shape
    tables = adapters.tables
    _add_kernel[(rows // TILE, triton.cdiv(outputs, 128))](
        out_NO, out_NO.stride(0), y, *y.stride()[:2], adapters.slot_of_tile, tables.b, tables.rank, tables.scale,
        tables.linears, linear, outputs, SPLITS=len(y), COLUMNS=128, TILE_ROWS=TILE, num_warps=4, num_stages=1,
        **overlapping(out_NO.device),
    )  # fmt: skip
