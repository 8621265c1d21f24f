"""Kernels over rows of activations: norms, and the low-rank products of many adapters in one batch.

Rows stand in tiles of TILE, and all rows of a tile use one adapter: `slot_of_tile` names its line in the tables of
`mint.engine.sampler.slots`, which hold the addresses of A and of B' (turned, so that neighbouring outputs lie side by
side), ranks and scales. So a kernel takes adapters of any rank, and a recorded graph stays valid when they change. Line
0 is the base model, of rank 0.

A low-rank product has two halves. `shrink` computes x A' for all linears of a projection, split along the inputs into
sums of fixed parts (`y` [splits, rows, linears, rank]), which the second half adds up in order; that half, y B' times
the scale, is part of whatever kernel reads the projection's output next. Nothing here depends on the number of rows:
a row computes the same bits in any company.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16
# Ranks are read in steps of this many, the least a matrix unit takes.
RANK_STEP = tl.constexpr(16)
# Arguments that differ from layer to layer or step to step: no new code for a value that happens to be round.
VARYING = ["first_linear", "linear_number", "rows"]


def splits_of(inputs: int) -> tuple[int, int]:
    """Into how many parts `shrink` splits its sums, and how long each is."""
    part = 256 if inputs <= 2048 else -(-inputs // 1024) * 128
    return -(-inputs // part), part


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
def expanded(
    y_ptr, b_table, rank_table, entry, linear, row, column, column_mask, outputs, rows, linears, rank_cap, scale,
    like_ptr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """scale * y B' of the rows at the columns of one linear, [ROWS, COLUMNS] in float32."""
    dtype = like_ptr.dtype.element_ty
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    rank = tl.load(rank_table + entry)
    if rank > 0:
        b_ptr = tl.multiple_of(tl.load(b_table + entry).to(tl.pointer_type(dtype)), 16)
        for start in range(0, rank, RANK_STEP):
            r = start + tl.arange(0, RANK_STEP)
            live = (r < rank)[None, :]
            y = tl.zeros([ROWS, RANK_STEP], dtype=tl.float32)
            for split in tl.static_range(SPLITS):
                place = ((split * rows + row[:, None]).to(tl.int64) * linears + linear) * rank_cap + r[None, :]
                y += tl.load(y_ptr + place, mask=live, other=0.0)
            b = tl.load(
                b_ptr + r[:, None] * outputs + column[None, :],
                mask=(r < rank)[:, None] & column_mask[None, :],
                other=0.0,
            )
            acc += tl.dot(y.to(dtype), b, input_precision="ieee")
    return acc * scale


@triton.jit(do_not_specialize=VARYING)
def _add_kernel(
    out_ptr, y_ptr, slot_of_tile, b_table, rank_table, scale_table, table_width, linear_number, rows, rank_cap, outputs,
    SPLITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    entry = slot * table_width + linear_number
    if tl.load(rank_table + entry) > 0:
        row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        mask = column < outputs
        scale = tl.load(scale_table + slot)
        added = expanded(
            y_ptr, b_table, rank_table, entry, 0, row, column, mask, outputs, rows, 1, rank_cap, scale, out_ptr,
            SPLITS, TILE_ROWS, COLUMNS,
        )  # fmt: skip
        place = out_ptr + row[:, None].to(tl.int64) * outputs + column[None, :]
        both = tl.load(place, mask=mask[None, :], other=0.0).to(tl.float32) + added
        tl.store(place, both.to(out_ptr.dtype.element_ty), mask=mask[None, :])


@triton.jit(do_not_specialize=VARYING)
def _norm_kernel(
    residual_ptr, delta_ptr, y_ptr, weight_ptr, out_ptr, slot_of_tile, b_table, rank_table, scale_table, table_width,
    linear_number, rows, rank_cap, width, eps,
    ADDS: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """residual += delta + low-rank part; out = norm(residual). A program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    mask = column < width
    dtype = out_ptr.dtype.element_ty
    x = tl.load(residual_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(delta_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        slot = tl.load(slot_of_tile + row // TILE_ROWS).to(tl.int64)
        entry = slot * table_width + linear_number
        rank = tl.load(rank_table + entry)
        if rank > 0:
            scale = tl.load(scale_table + slot)
            b_ptr = tl.multiple_of(tl.load(b_table + entry).to(tl.pointer_type(dtype)), 16)
            low = tl.zeros([WIDTH], dtype=tl.float32)
            for start in range(0, rank, STEP):
                r = start + tl.arange(0, STEP)
                y = tl.zeros([STEP], dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    y += tl.load(y_ptr + (split * rows + row) * rank_cap + r, mask=r < rank, other=0.0)
                b = tl.load(
                    b_ptr + r[:, None] * width + column[None, :], mask=(r < rank)[:, None] & mask[None, :], other=0.0
                )
                low += tl.sum(b.to(tl.float32) * y.to(dtype).to(tl.float32)[:, None], axis=0)
            added += scale * low
        x = (x + added).to(dtype).to(tl.float32)
        tl.store(residual_ptr + row * width + column, x.to(dtype), mask=mask)
    root = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, ((x * root).to(dtype).to(tl.float32) * weight).to(dtype), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def _gate_kernel(
    gate_up_ptr, y_ptr, out_ptr, slot_of_tile, b_table, rank_table, scale_table, table_width, first_linear, rows,
    rank_cap, width, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up, the low-rank parts of both added first."""
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    scale = tl.load(scale_table + slot)
    entry = slot * table_width + first_linear
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    mask = column < width
    dtype = out_ptr.dtype.element_ty
    place = gate_up_ptr + row[:, None].to(tl.int64) * (2 * width) + column[None, :]
    gate = tl.load(place, mask=mask[None, :], other=0.0).to(tl.float32)
    gate += expanded(
        y_ptr, b_table, rank_table, entry, 0, row, column, mask, width, rows, 2, rank_cap, scale, out_ptr,
        SPLITS, TILE_ROWS, COLUMNS,
    )  # fmt: skip
    up = tl.load(place + width, mask=mask[None, :], other=0.0).to(tl.float32)
    up += expanded(
        y_ptr, b_table, rank_table, entry + 1, 1, row, column, mask, width, rows, 2, rank_cap, scale, out_ptr,
        SPLITS, TILE_ROWS, COLUMNS,
    )  # fmt: skip
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    gated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row[:, None].to(tl.int64) * width + column[None, :], gated.to(dtype), mask=mask[None, :])


@triton.jit(do_not_specialize=VARYING)
def _heads_kernel(
    qkv_ptr, y_ptr, norm_ptr, cos_ptr, sin_ptr, position_ptr, cache_slot_ptr, q_ptr, key_ptr, value_ptr,
    slot_of_tile, b_table, rank_table, scale_table, table_width, first_linear, rows, rank_cap, heads, kv_heads, eps,
    NORMS: tl.constexpr, SPLITS: tl.constexpr, HALF: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """From a projection to heads: adds the low-rank part, norms and turns queries and keys, and puts keys and values
    into the cache. A program a tile and head; halves of a head apart, because the rotation mixes them."""
    tile, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    scale = tl.load(scale_table + slot)
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dtype = q_ptr.dtype.element_ty
    linear = tl.where(head < heads, 0, tl.where(head < heads + kv_heads, 1, 2))
    first_head = tl.where(head < heads, 0, tl.where(head < heads + kv_heads, heads, heads + kv_heads))
    entry = slot * table_width + first_linear + linear
    outputs = tl.where(head < heads, heads, kv_heads) * (2 * HALF)
    column = tl.arange(0, HALF)
    every = column >= 0
    size = 2 * HALF
    place = qkv_ptr + (row[:, None].to(tl.int64) * (heads + 2 * kv_heads) + head) * size + column[None, :]
    in_linear = (head - first_head) * size + column
    low = tl.load(place).to(tl.float32) + expanded(
        y_ptr, b_table, rank_table, entry, linear, row, in_linear, every, outputs, rows, 3, rank_cap, scale,
        q_ptr, SPLITS, TILE_ROWS, HALF,
    )  # fmt: skip
    high = tl.load(place + HALF).to(tl.float32) + expanded(
        y_ptr, b_table, rank_table, entry, linear, row, in_linear + HALF, every, outputs, rows, 3, rank_cap,
        scale, q_ptr, SPLITS, TILE_ROWS, HALF,
    )  # fmt: skip
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
        angle = tl.load(position_ptr + row)[:, None].to(tl.int64) * size + column[None, :]
        cos, sin = tl.load(cos_ptr + angle).to(tl.float32), tl.load(sin_ptr + angle).to(tl.float32)
        low, high = low * cos - high * sin, high * cos + low * sin
    if head < heads:
        out = q_ptr + (row[:, None].to(tl.int64) * heads + head) * size + column[None, :]
        tl.store(out, low.to(dtype))
        tl.store(out + HALF, high.to(dtype))
    else:
        cache_slot = tl.load(cache_slot_ptr + row).to(tl.int64)
        written = (cache_slot >= 0)[:, None]
        kv_head = head - first_head
        offset = (cache_slot[:, None] * kv_heads + kv_head) * size + column[None, :]
        if turns:
            tl.store(key_ptr + offset, low.to(dtype), mask=written)
            tl.store(key_ptr + offset + HALF, high.to(dtype), mask=written)
        else:
            tl.store(value_ptr + offset, low.to(dtype), mask=written)
            tl.store(value_ptr + offset + HALF, high.to(dtype), mask=written)


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


def shrink(x_NI: Tensor, tables: Tables, slot_of_tile: Tensor, first_linear: int, linears: int) -> Tensor:
    """x A' for the linears `first_linear`..., [splits, N, linears, rank_cap]; what lies beyond a rank is not set."""
    rows, inputs = x_NI.shape
    splits, part = splits_of(inputs)
    y = torch.empty(splits, rows, linears, tables.rank_cap, dtype=torch.float32, device=x_NI.device)
    grid = (rows // TILE, splits, linears * tables.rank_cap // 16)
    _shrink_kernel[grid](
        x_NI, y, slot_of_tile, tables.a, tables.rank, tables.linears, first_linear, inputs, rows, linears,
        tables.rank_cap, PART=part, STEP=128, TILE_ROWS=TILE, num_warps=4,
    )  # fmt: skip
    return y


def add_low_rank(out_NO: Tensor, y: Tensor, tables: Tables, slot_of_tile: Tensor, linear: int) -> None:
    """out += scale * y B', in place, for a projection of one linear."""
    rows, outputs = out_NO.shape
    _add_kernel[(rows // TILE, triton.cdiv(outputs, 128))](
        out_NO, y, slot_of_tile, tables.b, tables.rank, tables.scale, tables.linears, linear, rows, tables.rank_cap,
        outputs, SPLITS=len(y), COLUMNS=128, TILE_ROWS=TILE, num_warps=4,
    )  # fmt: skip


def add_and_norm(
    residual_NH: Tensor, delta: tuple[Tensor, Tensor, int] | None, weight_H: Tensor, eps: float, tables: Tables,
    slot_of_tile: Tensor,
) -> Tensor:  # fmt: skip
    """Adds a projection of one linear (its output, its y, its number) to the residual in place; the residual's norm."""
    rows, width = residual_NH.shape
    out_NH = torch.empty_like(residual_NH)
    delta_NH, y, linear = (residual_NH, residual_NH, 0) if delta is None else delta
    width_up = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        residual_NH, delta_NH, y, weight_H, out_NH, slot_of_tile, tables.b, tables.rank, tables.scale, tables.linears,
        linear, rows, tables.rank_cap, width, eps, ADDS=delta is not None, SPLITS=1 if delta is None else len(y),
        WIDTH=width_up, STEP=max(1, min(16, 16384 // width_up)), TILE_ROWS=TILE, num_warps=4,
    )  # fmt: skip
    return out_NH


def gate(gate_up_NI: Tensor, y: Tensor, tables: Tables, slot_of_tile: Tensor, first_linear: int) -> Tensor:
    rows, width = gate_up_NI.shape[0], gate_up_NI.shape[1] // 2
    out_NI = torch.empty(rows, width, dtype=gate_up_NI.dtype, device=gate_up_NI.device)
    _gate_kernel[(rows // TILE, triton.cdiv(width, 128))](
        gate_up_NI, y, out_NI, slot_of_tile, tables.b, tables.rank, tables.scale, tables.linears, first_linear, rows,
        tables.rank_cap, width, SPLITS=len(y), COLUMNS=128, TILE_ROWS=TILE, num_warps=4,
    )  # fmt: skip
    return out_NI


def heads(
    qkv_NO: Tensor, y: Tensor, norm_HD: Tensor | None, rotary: tuple[Tensor, Tensor], position_N: Tensor,
    cache_slot_N: Tensor, cache: tuple[Tensor, Tensor], shape: tuple[int, int, int], eps: float, tables: Tables,
    slot_of_tile: Tensor, first_linear: int,
) -> Tensor:  # fmt: skip
    """The turned queries [N, H, D]; keys and values go to the cache [blocks, block_size, K, D], where a row of slot -1
    leaves nothing. `shape` is (H, K, D)."""
    rows = len(qkv_NO)
    query_heads, kv_heads, size = shape
    q_NHD = torch.empty(rows, query_heads, size, dtype=qkv_NO.dtype, device=qkv_NO.device)
    arguments: Any = (
        qkv_NO, y, qkv_NO if norm_HD is None else norm_HD, *rotary, position_N, cache_slot_N, q_NHD, *cache,
        slot_of_tile, tables.b, tables.rank, tables.scale, tables.linears, first_linear, rows, tables.rank_cap,
        query_heads, kv_heads, eps,
    )  # fmt: skip
    _heads_kernel[(rows // TILE, query_heads + 2 * kv_heads)](
        *arguments, NORMS=norm_HD is not None, SPLITS=len(y), HALF=size // 2, TILE_ROWS=TILE, num_warps=4
    )
    return q_NHD
