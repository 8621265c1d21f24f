"""Kernels over rows of activations: norms, the gate, heads. Each adds up the parts of the product it reads and the
second half of the adapters' low-rank product (see `low_rank`) before it does its own work.

Norms take several rows at once where there are many, unless they are asked to be steady.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.kernels.low_rank import RANK_STEP, TILE, VARYING, Adapters, adapter_at, b_step, expanded, y_step
from mint.engine.kernels.overlap import follow, overlapping

# From here on the card is full with fewer and larger programs of the gate.
_WIDE_ROWS = 512


@dataclass(frozen=True)
class Product:
    """What a projection gives, before the second half of its adapters' product is added to it."""

    out: Tensor
    """[splits, N, outputs]: partial sums, to be added up in order."""
    y: Tensor
    """[splits, N, linears, rank], likewise; what lies beyond an adapter's rank, in whole steps, is not set."""
    linear: int
    """The number of its first linear in the tables."""


@triton.jit
def summed(ptr, split, mask, like_ptr, SPLITS: tl.constexpr):
    """Partial sums added up in order and rounded, as those of a whole product are."""
    total = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    for number in tl.static_range(1, SPLITS):
        total += tl.load(ptr + number * split, mask=mask, other=0.0).to(tl.float32)
    return total.to(like_ptr.dtype.element_ty).to(tl.float32)


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
    residual_ptr, delta_ptr, delta_split, delta_row, y_ptr, y_split, y_row, weight_ptr, delta_weight_ptr, out_ptr,
    slot_of_tile, b_table, rank_table, scale_table, table_width, linear_number, width, eps,
    ADDS: tl.constexpr, NORMS_DELTA: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """residual += delta + low-rank part, or the norm of both; out = norm(residual). A program takes a row, or a few of
    one tile, which then share what they read of B."""
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
            b = b_step(b_ptr, 0, rank, column, width, STEP)
    follow(OVERLAPS)
    x = tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        from_delta = delta_ptr + row[:, None].to(tl.int64) * delta_row + column[None, :]
        delta = summed(from_delta, delta_split, mask, out_ptr, PARTS)
        low = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        if ROWS == 1:  # all of a step's loads at once: a single row is a matter of latency
            if rank > 0:
                low += _low_of_row(y_ptr, y_split, y_row, 0, rank, b, SPLITS, STEP)
            for start in range(STEP, rank, STEP):
                b = b_step(b_ptr, start, rank, column, width, STEP)
                low += _low_of_row(y_ptr, y_split, y_row, start, rank, b, SPLITS, STEP)
        else:  # rank by rank: no thread waits for another's sum
            for start in range(0, rank, STEP):
                for r in tl.static_range(STEP):
                    y = tl.zeros([ROWS], dtype=tl.float32)
                    for split in tl.static_range(SPLITS):
                        y += tl.load(y_ptr + split * y_split + row.to(tl.int64) * y_row + start + r).to(tl.float32)
                    b = tl.load(b_ptr + (start + r) * width + column, mask=in_width & (start + r < rank), other=0.0)
                    low += y.to(dtype).to(tl.float32)[:, None] * b.to(tl.float32)[None, :]
        if NORMS_DELTA:
            delta = (delta + scale * low).to(dtype).to(tl.float32)
            delta_weight = tl.load(delta_weight_ptr + column, mask=in_width, other=0.0).to(tl.float32)[None, :]
            x += normed(delta, _root(delta, width, eps), delta_weight, out_ptr, WIDE)
        else:
            x = x + delta + scale * low
        x = x.to(dtype).to(tl.float32)
        tl.store(residual_ptr + place, x.to(dtype), mask=mask)
    tl.store(out_ptr + place, normed(x, _root(x, width, eps), weight, out_ptr, WIDE).to(dtype), mask=mask)


@triton.jit
def _root(x, width, eps):
    return tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None]


@triton.jit
def normed(x, root, weight, like_ptr, WIDE: tl.constexpr):
    """Rounded before it is multiplied by the weight and after, or WIDE, as some families have it, only after."""
    dtype = like_ptr.dtype.element_ty
    x = x * root
    if not WIDE:
        x = x.to(dtype).to(tl.float32)
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=VARYING)
def _gate_kernel(
    gate_up_ptr, gate_up_split, gate_up_row, y_ptr, y_split, y_row, y_linear, out_ptr, slot_of_tile, b_table,
    rank_table, scale_table, table_width, first_linear, width,
    GELU: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up, or gelu(gate) * up, the low-rank parts of both added first."""
    tile, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_of_tile + tile).to(tl.int64)
    rank, scale, b_ptr = adapter_at(slot, first_linear, b_table, rank_table, scale_table, table_width, out_ptr)
    up_rank, _, up_b_ptr = adapter_at(slot, first_linear + 1, b_table, rank_table, scale_table, table_width, out_ptr)
    b = b_step(b_ptr, 0, rank, column, width, RANK_STEP)
    up_b = b_step(up_b_ptr, 0, up_rank, column, width, RANK_STEP)
    follow(OVERLAPS)
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    mask = (column < width)[None, :]
    dtype = out_ptr.dtype.element_ty
    place = gate_up_ptr + row[:, None].to(tl.int64) * gate_up_row + column[None, :]
    gate = summed(place, gate_up_split, mask, out_ptr, PARTS)
    up = summed(place + width, gate_up_split, mask, out_ptr, PARTS)
    y = y_step(y_ptr, y_split, y_row, 0, rank, row, SPLITS)
    gate += expanded(y_ptr, y_split, y_row, rank, scale, b_ptr, y, b, row, column, width, SPLITS, TILE_ROWS, COLUMNS)
    y_ptr += y_linear
    y = y_step(y_ptr, y_split, y_row, 0, up_rank, row, SPLITS)
    up += expanded(
        y_ptr, y_split, y_row, up_rank, scale, up_b_ptr, y, up_b, row, column, width, SPLITS, TILE_ROWS, COLUMNS
    )
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    z = gate
    if GELU:  # by tanh: 2 sqrt(2 / pi) (x + 0.044715 x^3)
        z = gate * (1.5957691216057308 + 0.07135481282 * gate * gate)
    gated = (gate * tl.sigmoid(z)).to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row[:, None].to(tl.int64) * width + column[None, :], gated.to(dtype), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def _heads_kernel(
    qkv_ptr, qkv_split, qkv_row, y_ptr, y_split, y_row, y_linear, norm_ptr, cos_ptr, sin_ptr, position_ptr,
    cache_slot_ptr, q_ptr, key_ptr, value_ptr, slot_of_tile, b_table, rank_table, scale_table, table_width,
    first_linear, heads, kv_heads, eps,
    NORMS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, HALF: tl.constexpr,
    TILE_ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
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
    low_b = b_step(b_ptr, 0, rank, in_low, outputs, RANK_STEP)
    high_b = b_step(b_ptr, 0, rank, in_high, outputs, RANK_STEP)
    follow(OVERLAPS)
    place = qkv_ptr + row[:, None].to(tl.int64) * qkv_row + head * size + column[None, :]
    everywhere = (column < HALF)[None, :]
    low = summed(place, qkv_split, everywhere, q_ptr, PARTS)
    high = summed(place + HALF, qkv_split, everywhere, q_ptr, PARTS)
    y_ptr += linear * y_linear
    y = y_step(y_ptr, y_split, y_row, 0, rank, row, SPLITS)
    low += expanded(y_ptr, y_split, y_row, rank, scale, b_ptr, y, low_b, row, in_low, outputs, SPLITS, TILE_ROWS, HALF)
    high += expanded(
        y_ptr, y_split, y_row, rank, scale, b_ptr, y, high_b, row, in_high, outputs, SPLITS, TILE_ROWS, HALF
    )
    low, high = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
    turns = head < heads + kv_heads
    if turns:
        if NORMS:
            root = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / size + eps)[:, None]
            weight = norm_ptr + head * size + column
            low = normed(low, root, tl.load(weight).to(tl.float32)[None, :], q_ptr, WIDE)
            high = normed(high, root, tl.load(weight + HALF).to(tl.float32)[None, :], q_ptr, WIDE)
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


def add_and_norm(
    residual_NH: Tensor, product: Product | None, weight_H: Tensor, eps: float, adapters: Adapters,
    wide: bool = False, delta_weight_H: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Adds a projection of one linear to the residual in place, through a norm of its own if there is a weight for it;
    the residual's norm. `wide`: norms are multiplied in float32."""
    rows, width = residual_NH.shape
    tables = adapters.tables
    out_NH = torch.empty_like(residual_NH)
    delta, y, linear = (residual_NH[None], residual_NH[None], 0) if product is None else _parts(product)
    width_up = triton.next_power_of_2(width)
    height = 1 if adapters.few(rows) else 4
    # No more of B than registers hold.
    step = max(1, min(16, 16384 // width_up)) if height == 1 else 16
    _norm_kernel[(rows // height,)](
        residual_NH, delta, *delta.stride()[:2], y, *y.stride()[:2], weight_H,
        weight_H if delta_weight_H is None else delta_weight_H, out_NH, adapters.slot_of_tile, tables.b, tables.rank,
        tables.scale, tables.linears, linear, width, eps, ADDS=product is not None,
        NORMS_DELTA=delta_weight_H is not None, WIDE=wide, PARTS=len(delta), SPLITS=len(y), WIDTH=width_up, STEP=step,
        ROWS=height, TILE_ROWS=TILE, num_warps=4, num_stages=1, **overlapping(out_NH.device),
    )  # fmt: skip
    return out_NH


def gate(product: Product, adapters: Adapters, gelu: bool = False) -> Tensor:
    gate_up, y, first_linear = _parts(product)
    rows, width = gate_up.shape[1], gate_up.shape[2] // 2
    tables = adapters.tables
    out_NI = torch.empty(rows, width, dtype=adapters.dtype, device=gate_up.device)
    columns, warps = (64, 4) if rows < _WIDE_ROWS else (128, 2)
    _gate_kernel[(rows // TILE, triton.cdiv(width, columns))](
        gate_up, *gate_up.stride()[:2], y, *y.stride()[:3], out_NI, adapters.slot_of_tile, tables.b, tables.rank,
        tables.scale, tables.linears, first_linear, width, GELU=gelu, PARTS=len(gate_up), SPLITS=len(y),
        COLUMNS=columns, TILE_ROWS=TILE, num_warps=warps, num_stages=1, **overlapping(out_NI.device),
    )  # fmt: skip
    return out_NI


def heads(
    product: Product, norm_HD: Tensor | None, rotary: tuple[Tensor, Tensor], position_N: Tensor, cache_slot_N: Tensor,
    cache: tuple[Tensor, Tensor], shape: tuple[int, int, int], eps: float, adapters: Adapters, wide: bool = False,
) -> Tensor:  # fmt: skip
    """The turned queries [N, H, D]; keys and values go to the cache [blocks, block_size, K, D], where a row of slot -1
    leaves nothing. `shape` is (H, K, D); `wide` as in `add_and_norm`."""
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
        *arguments, NORMS=norm_HD is not None, WIDE=wide, PARTS=len(qkv), SPLITS=len(y), HALF=size // 2, TILE_ROWS=TILE,
        num_warps=4, num_stages=1, **overlapping(q_NHD.device),
    )  # fmt: skip
    return q_NHD


def _parts(product: Product) -> tuple[Tensor, Tensor, int]:
    return product.out, product.y, product.linear
