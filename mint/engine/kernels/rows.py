"""Kernels over rows of activations: norms, and the low-rank products of many adapters in one batch.

Rows stand in tiles of TILE, and all rows of a tile use one adapter: `slot_of_tile` names its line in the tables of
`mint.engine.sampler.slots`, which hold the addresses of A and of B' (turned, so that neighbouring outputs lie side by
side), ranks and scales. So a kernel takes adapters of any rank, and a recorded graph stays valid when they change. Line
0 is the base model, of rank 0.

A low-rank product has two halves. The first, y = x A' for all linears of a projection, is either part of the matrix
product, where A stands below the weights, or computed by `shrink`, split along the inputs into parts (`y` [splits,
rows, linears, rank], any strides), which the second half adds up in order; that half, y B' times the scale, is part of
whatever kernel reads the projection's output next. Many rows are not split, and norms take several at once, unless they
are asked to be steady: then nothing depends on the number of rows, and a row computes the same bits in any company.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.kernels.overlap import follow, overlapping

TILE = 16
# From here on the card is full without splitting sums.
_MANY_ROWS = 512
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


@dataclass(frozen=True)
class Product:
    """What a projection gives, before the second half of its adapters' product is added to it."""

    out: Tensor
    """[splits, N, outputs]: partial sums, to be added up in order."""
    y: Tensor
    """[splits, N, linears, rank], likewise; what lies beyond an adapter's rank, in whole steps, is not set."""
    linear: int
    """The number of its first linear in the tables."""


@triton.jit(do_not_specialize=VARYING)
def _shrink_kernel(
    x_ptr, y_ptr, slot_of_tile, a_table, rank_table, table_width, first_linear, inputs, rows, linears, rank_cap,
    PART: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tile, split, cell = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    steps = rank_cap // RANK_STEP
    linear, rank_start = cell // steps, (cell % steps) * RANK_STEP
    entry = tl.load(slot_of_tile + tile).to(tl.int64) * table_width + first_linear + linear
    rank = tl.load(rank_table + entry)
    follow(OVERLAPS)
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
def b_step(b_ptr, start, rank, column, outputs):
    """B' of one step of ranks at some columns, [RANK_STEP, columns]."""
    r = start + tl.arange(0, RANK_STEP)
    mask = (r < rank)[:, None] & (column < outputs)[None, :]
    return tl.load(b_ptr + r[:, None] * outputs + column[None, :], mask=mask, other=0.0)


@triton.jit
def y_step(y_ptr, y_split, y_row, start, row, SPLITS: tl.constexpr):
    """y of one step of ranks for some rows, added up, [rows, RANK_STEP] in float32."""
    place = row[:, None].to(tl.int64) * y_row + start + tl.arange(0, RANK_STEP)[None, :]
    y = tl.load(y_ptr + place).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        y += tl.load(y_ptr + split * y_split + place).to(tl.float32)
    return y


@triton.jit
def summed(ptr, split, mask, like_ptr, SPLITS: tl.constexpr):
    """Partial sums added up in order and rounded, as those of a whole product are."""
    total = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    for number in tl.static_range(1, SPLITS):
        total += tl.load(ptr + number * split, mask=mask, other=0.0).to(tl.float32)
    return total.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def expanded(
    y_ptr, y_split, y_row, rank, scale, b_ptr, first_b, row, column, outputs,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The low-rank product of the rows of a tile at the columns of one linear, [ROWS, COLUMNS] in float32. `first_b`:
    `b_step` of the first ranks, loaded before."""
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    if rank > 0:
        acc = tl.dot(y_step(y_ptr, y_split, y_row, 0, row, SPLITS).to(first_b.dtype), first_b, input_precision="ieee")
        for start in range(RANK_STEP, rank, RANK_STEP):
            b = b_step(b_ptr, start, rank, column, outputs)
            acc += tl.dot(y_step(y_ptr, y_split, y_row, start, row, SPLITS).to(b.dtype), b, input_precision="ieee")
    return acc * scale


@triton.jit(do_not_specialize=VARYING)
def _add_kernel(
    out_ptr, out_row, y_ptr, y_split, y_row, slot_of_tile, b_table, rank_table, scale_table, table_width, linear_number,
    outputs, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    rank, scale, b_ptr = adapter_at(slot, linear_number, b_table, rank_table, scale_table, table_width, out_ptr)
    b = b_step(b_ptr, 0, rank, column, outputs)
    follow(OVERLAPS)
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    mask = (column < outputs)[None, :]
    place = out_ptr + row[:, None].to(tl.int64) * out_row + column[None, :]
    out = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    out += expanded(y_ptr, y_split, y_row, rank, scale, b_ptr, b, row, column, outputs, SPLITS, TILE_ROWS, COLUMNS)
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _b_of_row(b_ptr, start, rank, column, width, STEP: tl.constexpr):
    r = start + tl.arange(0, STEP)
    mask = (r < rank)[:, None] & (column < width)[None, :]
    return tl.load(b_ptr + r[:, None] * width + column[None, :], mask=mask, other=0.0)


@triton.jit
def _low_of_row(y_ptr, y_split, y_row, start, rank, b, SPLITS: tl.constexpr, STEP: tl.constexpr):
    """What a step of ranks adds to the program's one row, [1, WIDTH]."""
    r = start + tl.arange(0, STEP)
    y = tl.zeros([STEP], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        line = y_ptr + split * y_split + tl.program_id(0).to(tl.int64) * y_row
        y += tl.load(line + r, mask=r < rank, other=0.0).to(tl.float32)
    return tl.sum(b.to(tl.float32) * y.to(b.dtype).to(tl.float32)[:, None], axis=0)[None, :]


@triton.jit(do_not_specialize=VARYING)
def _norm_kernel(
    residual_ptr, delta_ptr, delta_split, delta_row, y_ptr, y_split, y_row, weight_ptr, out_ptr, slot_of_tile, b_table,
    rank_table, scale_table, table_width, linear_number, width, eps,
    ADDS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """residual += delta + low-rank part; out = norm(residual). A program takes a row, or a few of one tile, which then
    share what they read of B."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    in_width = column < width
    mask = in_width[None, :]
    dtype = out_ptr.dtype.element_ty
    place = row[:, None].to(tl.int64) * width + column[None, :]
    weight = tl.load(weight_ptr + column, mask=in_width, other=0.0).to(tl.float32)[None, :]
    if ADDS:
        slot = tl.load(slot_of_tile + tl.program_id(0) * ROWS // TILE_ROWS).to(tl.int64)
        rank, scale, b_ptr = adapter_at(slot, linear_number, b_table, rank_table, scale_table, table_width, out_ptr)
        if ROWS == 1:
            b = _b_of_row(b_ptr, 0, rank, column, width, STEP)
    follow(OVERLAPS)
    x = tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        delta = delta_ptr + row[:, None].to(tl.int64) * delta_row + column[None, :]
        x += summed(delta, delta_split, mask, out_ptr, PARTS)
        low = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        if ROWS == 1:  # all of a step's loads at once: a single row is a matter of latency
            if rank > 0:
                low += _low_of_row(y_ptr, y_split, y_row, 0, rank, b, SPLITS, STEP)
            for start in range(STEP, rank, STEP):
                b = _b_of_row(b_ptr, start, rank, column, width, STEP)
                low += _low_of_row(y_ptr, y_split, y_row, start, rank, b, SPLITS, STEP)
        else:  # rank by rank: no thread waits for another's sum
            for start in range(0, rank, STEP):
                for r in tl.static_range(STEP):
                    y = tl.zeros([ROWS], dtype=tl.float32)
                    for split in tl.static_range(SPLITS):
                        y += tl.load(y_ptr + split * y_split + row.to(tl.int64) * y_row + start + r).to(tl.float32)
                    b = tl.load(b_ptr + (start + r) * width + column, mask=in_width & (start + r < rank), other=0.0)
                    low += y.to(dtype).to(tl.float32)[:, None] * b.to(tl.float32)[None, :]
        x = (x + scale * low).to(dtype).to(tl.float32)
        tl.store(residual_ptr + place, x.to(dtype), mask=mask)
    root = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]
    tl.store(out_ptr + place, ((x * root).to(dtype).to(tl.float32) * weight).to(dtype), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def _gate_kernel(
    gate_up_ptr, gate_up_split, gate_up_row, y_ptr, y_split, y_row, y_linear, out_ptr, slot_of_tile, b_table,
    rank_table, scale_table, table_width, first_linear, width,
    PARTS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up, the low-rank parts of both added first."""
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    rank, scale, b_ptr = adapter_at(slot, first_linear, b_table, rank_table, scale_table, table_width, out_ptr)
    up_rank, _, up_b_ptr = adapter_at(slot, first_linear + 1, b_table, rank_table, scale_table, table_width, out_ptr)
    b, up_b = b_step(b_ptr, 0, rank, column, width), b_step(up_b_ptr, 0, up_rank, column, width)
    follow(OVERLAPS)
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    mask = (column < width)[None, :]
    dtype = out_ptr.dtype.element_ty
    place = gate_up_ptr + row[:, None].to(tl.int64) * gate_up_row + column[None, :]
    gate = summed(place, gate_up_split, mask, out_ptr, PARTS)
    up = summed(place + width, gate_up_split, mask, out_ptr, PARTS)
    gate += expanded(y_ptr, y_split, y_row, rank, scale, b_ptr, b, row, column, width, SPLITS, TILE_ROWS, COLUMNS)
    y_ptr += y_linear
    up += expanded(
        y_ptr, y_split, y_row, up_rank, scale, up_b_ptr, up_b, row, column, width, SPLITS, TILE_ROWS, COLUMNS
    )
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    gated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row[:, None].to(tl.int64) * width + column[None, :], gated.to(dtype), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def _heads_kernel(
    qkv_ptr, qkv_split, qkv_row, y_ptr, y_split, y_row, y_linear, norm_ptr, cos_ptr, sin_ptr, position_ptr,
    cache_slot_ptr, q_ptr, key_ptr, value_ptr, slot_of_tile, b_table, rank_table, scale_table, table_width,
    first_linear, heads, kv_heads, eps,
    NORMS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, HALF: tl.constexpr, TILE_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """From a projection to heads: adds the low-rank part, norms and turns queries and keys, and puts keys and values
    into the cache. A program a tile and head; its halves apart, because the rotation mixes them."""
    tile, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dtype = q_ptr.dtype.element_ty
    linear = tl.where(head < heads, 0, tl.where(head < heads + kv_heads, 1, 2))
    first_head = tl.where(head < heads, 0, tl.where(head < heads + kv_heads, heads, heads + kv_heads))
    outputs = tl.where(head < heads, heads, kv_heads) * (2 * HALF)
    column = tl.arange(0, HALF)
    size = 2 * HALF
    rank, scale, b_ptr = adapter_at(slot, first_linear + linear, b_table, rank_table, scale_table, table_width, q_ptr)
    cache_slot = tl.load(cache_slot_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row)[:, None].to(tl.int64)
    in_low = (head - first_head) * size + column
    in_high = in_low + HALF
    low_b, high_b = b_step(b_ptr, 0, rank, in_low, outputs), b_step(b_ptr, 0, rank, in_high, outputs)
    follow(OVERLAPS)
    place = qkv_ptr + row[:, None].to(tl.int64) * qkv_row + head * size + column[None, :]
    everywhere = (column < HALF)[None, :]
    low = summed(place, qkv_split, everywhere, q_ptr, PARTS)
    high = summed(place + HALF, qkv_split, everywhere, q_ptr, PARTS)
    y_ptr += linear * y_linear
    low += expanded(y_ptr, y_split, y_row, rank, scale, b_ptr, low_b, row, in_low, outputs, SPLITS, TILE_ROWS, HALF)
    high += expanded(y_ptr, y_split, y_row, rank, scale, b_ptr, high_b, row, in_high, outputs, SPLITS, TILE_ROWS, HALF)
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    turns = head < heads + kv_heads
    if turns:
        if NORMS:
            root = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / size + eps)[:, None]
            weight = norm_ptr + head * size + column
            low = (
                ((low * root).to(dtype).to(tl.float32) * tl.load(weight).to(tl.float32)[None, :])
                .to(dtype)
                .to(tl.float32)
            )
            high = (
                ((high * root).to(dtype).to(tl.float32) * tl.load(weight + HALF).to(tl.float32)[None, :])
                .to(dtype)
                .to(tl.float32)
            )
        angle = position * size + column[None, :]
        cos, sin = tl.load(cos_ptr + angle).to(tl.float32), tl.load(sin_ptr + angle).to(tl.float32)
        low, high = low * cos - high * sin, high * cos + low * sin
    if head < heads:
        out = q_ptr + (row[:, None].to(tl.int64) * heads + head) * size + column[None, :]
        tl.store(out, low.to(dtype))
        tl.store(out + HALF, high.to(dtype))
    else:
        written = (cache_slot >= 0)[:, None]
        kv_head = head - first_head
        offset = (cache_slot[:, None] * kv_heads + kv_head) * size + column[None, :]
        if turns:
            tl.store(key_ptr + offset, low.to(dtype), mask=written)
            tl.store(key_ptr + offset + HALF, high.to(dtype), mask=written)
        else:
            tl.store(value_ptr + offset, low.to(dtype), mask=written)
            tl.store(value_ptr + offset + HALF, high.to(dtype), mask=written)


def shrink(x_NI: Tensor, adapters: Adapters, first_linear: int, linears: int) -> Tensor:
    """x A' for the linears `first_linear`..., [splits, N, linears, rank_cap]; what lies beyond a rank, in whole steps,
    is not set."""
    rows, inputs = x_NI.shape
    tables = adapters.tables
    splits, part = adapters.splits(inputs, rows)
    y = torch.empty(splits, rows, linears, tables.rank_cap, dtype=torch.float32, device=x_NI.device)
    grid = (rows // TILE, splits, linears * tables.rank_cap // 16)
    _shrink_kernel[grid](
        x_NI, y, adapters.slot_of_tile, tables.a, tables.rank, tables.linears, first_linear, inputs, rows, linears,
        tables.rank_cap, PART=part, STEP=128, TILE_ROWS=TILE, num_warps=4, **overlapping(x_NI.device),
    )  # fmt: skip
    return y


def add_low_rank(out_NO: Tensor, y: Tensor, adapters: Adapters, linear: int) -> None:
    """out += scale * y B', in place, for a projection of one linear."""
    rows, outputs = out_NO.shape
    tables = adapters.tables
    _add_kernel[(rows // TILE, triton.cdiv(outputs, 128))](
        out_NO, out_NO.stride(0), y, *y.stride()[:2], adapters.slot_of_tile, tables.b, tables.rank, tables.scale,
        tables.linears, linear, outputs, SPLITS=len(y), COLUMNS=128, TILE_ROWS=TILE, num_warps=4, num_stages=1,
        **overlapping(out_NO.device),
    )  # fmt: skip


def add_and_norm(
    residual_NH: Tensor, product: Product | None, weight_H: Tensor, eps: float, adapters: Adapters
) -> Tensor:
    """Adds a projection of one linear to the residual in place; the residual's norm."""
    rows, width = residual_NH.shape
    tables = adapters.tables
    out_NH = torch.empty_like(residual_NH)
    delta, y, linear = (residual_NH[None], residual_NH[None], 0) if product is None else _parts(product)
    width_up = triton.next_power_of_2(width)
    height = 1 if adapters.few(rows) or rows <= 2 * _MANY_ROWS else 4
    # No more of B than registers hold.
    step = max(1, min(16, 16384 // width_up)) if height == 1 else 16
    _norm_kernel[(rows // height,)](
        residual_NH, delta, *delta.stride()[:2], y, *y.stride()[:2], weight_H, out_NH, adapters.slot_of_tile, tables.b,
        tables.rank, tables.scale, tables.linears, linear, width, eps, ADDS=product is not None, PARTS=len(delta),
        SPLITS=len(y), WIDTH=width_up, STEP=step, ROWS=height, TILE_ROWS=TILE, num_warps=4, num_stages=1,
        **overlapping(out_NH.device),
    )  # fmt: skip
    return out_NH


def gate(product: Product, adapters: Adapters) -> Tensor:
    gate_up, y, first_linear = _parts(product)
    rows, width = gate_up.shape[1], gate_up.shape[2] // 2
    tables = adapters.tables
    out_NI = torch.empty(rows, width, dtype=adapters.dtype, device=gate_up.device)
    columns, warps = (64, 4) if rows < _MANY_ROWS else (128, 2)
    _gate_kernel[(rows // TILE, triton.cdiv(width, columns))](
        gate_up, *gate_up.stride()[:2], y, *y.stride()[:3], out_NI, adapters.slot_of_tile, tables.b, tables.rank,
        tables.scale, tables.linears, first_linear, width, PARTS=len(gate_up), SPLITS=len(y), COLUMNS=columns,
        TILE_ROWS=TILE, num_warps=warps, num_stages=1, **overlapping(out_NI.device),
    )  # fmt: skip
    return out_NI


def heads(
    product: Product, norm_HD: Tensor | None, rotary: tuple[Tensor, Tensor], position_N: Tensor, cache_slot_N: Tensor,
    cache: tuple[Tensor, Tensor], shape: tuple[int, int, int], eps: float, adapters: Adapters,
) -> Tensor:  # fmt: skip
    """The turned queries [N, H, D]; keys and values go to the cache [blocks, block_size, K, D], where a row of slot -1
    leaves nothing. `shape` is (H, K, D)."""
    qkv, y, first_linear = _parts(product)
    rows = qkv.shape[1]
    query_heads, kv_heads, size = shape
    tables = adapters.tables
    q_NHD = torch.empty(rows, query_heads, size, dtype=adapters.dtype, device=qkv.device)
    arguments: Any = (
        qkv, *qkv.stride()[:2], y, *y.stride()[:3], qkv if norm_HD is None else norm_HD, *rotary, position_N,
        cache_slot_N, q_NHD, *cache, adapters.slot_of_tile, tables.b, tables.rank, tables.scale, tables.linears,
        first_linear, query_heads, kv_heads, eps,
    )  # fmt: skip
    _heads_kernel[(rows // TILE, query_heads + 2 * kv_heads)](
        *arguments, NORMS=norm_HD is not None, PARTS=len(qkv), SPLITS=len(y), HALF=size // 2, TILE_ROWS=TILE,
        num_warps=4, num_stages=1, **overlapping(q_NHD.device),
    )  # fmt: skip
    return q_NHD


def _parts(product: Product) -> tuple[Tensor, Tensor, int]:
    return product.out, product.y, product.linear
