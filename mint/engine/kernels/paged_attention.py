"""Attention over key/value blocks: one token of each of many sequences (`decode`), or spans of prompts (`span`).

Both read keys and values where they lie, through block tables, and never beyond a sequence's own tokens: what other
tenants left in a block is not even loaded. Sums run over pieces of fixed length; those of `decode` depend on how many
rows there are, unless it is asked to be steady.

Shapes: N rows of a pass, A of them, L lines of the block tables, M blocks of the longest, H query heads, K key/value
heads, D head size, S tiles of queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.kernels.overlap import follow, overlapping

CHUNK = 256
"""Tokens of a context that one program of `decode` reads."""
SPAN = 64
"""Queries one program of `span` computes."""
_KEYS = 64
# Of 14 shapes tried on an H200 for 1, 256 and 1024 sequences of 128 tokens: the best while there are few programs, and
# the best once they fill the card several times over.
_DECODE = {"num_warps": 4, "num_stages": 2}
_DECODE_BYTES = 2**15  # of keys in one round, half of what fits
_DECODE_MANY = {"KEYS": 32, "num_warps": 1, "num_stages": 3}
_MANY_PROGRAMS = 1024


@triton.jit(do_not_specialize=["window"])
def _decode_kernel(
    q_ptr, key_ptr, value_ptr, out_ptr, part_ptr, peak_ptr, active_ptr, line_ptr, table_ptr, length_ptr, table_width,
    heads, kv_heads, window, scale, chunks,
    GROUP: tl.constexpr, GROUP_UP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHUNK_: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    # Heads first: what those of one sequence read lies side by side in memory.
    kv_head, place, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(active_ptr + place).to(tl.int64)
    line = tl.maximum(tl.load(line_ptr + place), 0).to(tl.int64)
    length = tl.load(length_ptr + line)
    follow(OVERLAPS)
    if row >= 0:
        first = tl.maximum(chunk * CHUNK_, tl.maximum(length - window, 0) // KEYS * KEYS)
        last = tl.minimum(length, (chunk + 1) * CHUNK_)
        # Keys stand where queries usually do: a group is small, and what is on that side comes in sixteens.
        g, d = tl.arange(0, GROUP_UP), tl.arange(0, SIZE)
        head = kv_head * GROUP + g
        live = (g < GROUP)[None, :]
        q = tl.load(q_ptr + (row * heads + head[None, :]) * SIZE + d[:, None], mask=live, other=0.0)
        peak = tl.full([GROUP_UP], float("-inf"), dtype=tl.float32)
        total = tl.zeros([GROUP_UP], dtype=tl.float32)
        acc = tl.zeros([SIZE, GROUP_UP], dtype=tl.float32)
        for start in range(first, last, KEYS):
            token = start + tl.arange(0, KEYS)
            here = token < length
            block = tl.load(table_ptr + line * table_width + token // BLOCK, mask=here, other=0).to(tl.int64)
            offset = ((block * BLOCK + token % BLOCK) * kv_heads + kv_head) * SIZE
            k = tl.load(key_ptr + offset[:, None] + d[None, :], mask=here[:, None], other=0.0)
            v = tl.load(value_ptr + offset[None, :] + d[:, None], mask=here[None, :], other=0.0)
            seen = here & (token >= length - window)
            score = tl.where(seen[:, None], tl.dot(k, q, input_precision="ieee") * scale, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, axis=0))
            # Before the first visible key of a window everything is -inf.
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weight = tl.exp(score - safe[None, :])
            shrunk = tl.exp(peak - safe)
            total = total * shrunk + tl.sum(weight, axis=0)
            acc = acc * shrunk[None, :] + tl.dot(v, weight.to(v.dtype), input_precision="ieee")
            peak = new_peak
        if SPLITS:
            part = (row * heads + head) * chunks + chunk
            tl.store(part_ptr + part[None, :] * SIZE + d[:, None], acc, mask=live)
            tl.store(peak_ptr + part * 2, peak, mask=g < GROUP)
            tl.store(peak_ptr + part * 2 + 1, total, mask=g < GROUP)
        else:
            out = (acc / total[None, :]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (row * heads + head[None, :]) * SIZE + d[:, None], out, mask=live)


@triton.jit
def _gather_kernel(
    part_ptr, peak_ptr, out_ptr, active_ptr, line_ptr, length_ptr, heads, chunks,
    CHUNK_: tl.constexpr, SIZE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Puts the chunks of a context together, in their order."""
    follow(OVERLAPS)
    row, head = tl.load(active_ptr + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    if row >= 0:
        used = (tl.load(length_ptr + tl.load(line_ptr + tl.program_id(0))) + CHUNK_ - 1) // CHUNK_
        d = tl.arange(0, SIZE)
        base = (row * heads + head) * chunks
        peak = tl.full([], float("-inf"), dtype=tl.float32)
        for chunk in range(0, used):
            peak = tl.maximum(peak, tl.load(peak_ptr + (base + chunk) * 2))
        total = tl.zeros([], dtype=tl.float32)
        acc = tl.zeros([SIZE], dtype=tl.float32)
        for chunk in range(0, used):
            share = tl.exp(tl.load(peak_ptr + (base + chunk) * 2) - peak)
            total += share * tl.load(peak_ptr + (base + chunk) * 2 + 1)
            acc += share * tl.load(part_ptr + (base + chunk) * SIZE + d)
        tl.store(out_ptr + (row * heads + head) * SIZE + d, (acc / total).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["window"])
def _span_kernel(
    q_ptr, key_ptr, value_ptr, out_ptr, tile_ptr, table_ptr, table_width, heads, kv_heads, window, scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A tile: (first row, rows, position of the first, line of the block table)."""
    follow(OVERLAPS)
    tile, head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tile_ptr + tile * 4).to(tl.int64)
    count = tl.load(tile_ptr + tile * 4 + 1)
    first_position = tl.load(tile_ptr + tile * 4 + 2)
    line = tl.load(tile_ptr + tile * 4 + 3).to(tl.int64)
    kv_head = head // GROUP
    i, d = tl.arange(0, QUERIES), tl.arange(0, SIZE)
    position = first_position + i
    place = ((first_row + i)[:, None] * heads + head) * SIZE + d[None, :]
    q = tl.load(q_ptr + place, mask=(i < count)[:, None], other=0.0)
    peak = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    acc = tl.zeros([QUERIES, SIZE], dtype=tl.float32)
    end = first_position + count
    for start in range(tl.maximum(first_position - window + 1, 0) // KEYS * KEYS, end, KEYS):
        token = start + tl.arange(0, KEYS)
        here = token < end
        block = tl.load(table_ptr + line * table_width + token // BLOCK, mask=here, other=0).to(tl.int64)
        offset = ((block * BLOCK + token % BLOCK) * kv_heads + kv_head) * SIZE
        k = tl.load(key_ptr + offset[None, :] + d[:, None], mask=here[None, :], other=0.0)
        v = tl.load(value_ptr + offset[:, None] + d[None, :], mask=here[:, None], other=0.0)
        distance = position[:, None] - token[None, :]
        seen = (distance >= 0) & (distance < window) & here[None, :]
        score = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp(score - safe[:, None])
        shrunk = tl.exp(peak - safe)
        total = total * shrunk + tl.sum(weight, axis=1)
        acc = acc * shrunk[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = new_peak
    tl.store(out_ptr + place, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=(i < count)[:, None])


# No context is longer: a layer without a window.
_NO_WINDOW = 2**30


def decode(
    q_NHD: Tensor, cache: tuple[Tensor, Tensor], out_NHD: Tensor, active_A: Tensor, line_A: Tensor, table_LM: Tensor,
    length_L: Tensor, longest: int, scale: float, window: int | None, steady: bool = False,
) -> None:  # fmt: skip
    """Attention of the rows named by `active_A` (-1: nobody), each over the tokens of a line of the block tables, its
    own token the last of them. `longest`: what no length exceeds. `steady`: sums do not depend on how many rows."""
    (_, heads, size), (_, block, kv_heads, _) = q_NHD.shape, cache[0].shape
    group = heads // kv_heads
    chunks = triton.cdiv(longest, CHUNK)
    many = steady or len(active_A) * kv_heads * chunks >= _MANY_PROGRAMS
    few = _DECODE | {"KEYS": min(128, _DECODE_BYTES // (size * q_NHD.element_size()))}
    part = peak = q_NHD
    if chunks > 1:
        part = torch.empty(len(q_NHD), heads, chunks, size, dtype=torch.float32, device=q_NHD.device)
        peak = torch.empty(len(q_NHD), heads, chunks, 2, dtype=torch.float32, device=q_NHD.device)
    _decode_kernel[(kv_heads, len(active_A), chunks)](
        q_NHD, *cache, out_NHD, part, peak, active_A, line_A, table_LM, length_L, table_LM.shape[1], heads,
        kv_heads, window or _NO_WINDOW, scale, chunks, GROUP=group, GROUP_UP=max(8, triton.next_power_of_2(group)),
        SIZE=size, BLOCK=block, CHUNK_=CHUNK, SPLITS=chunks > 1,
        **(_DECODE_MANY if many else few), **overlapping(q_NHD.device),
    )  # fmt: skip
    if chunks > 1:
        _gather_kernel[(len(active_A), heads)](
            part, peak, out_NHD, active_A, line_A, length_L, heads, chunks, CHUNK_=CHUNK, SIZE=size, num_warps=1,
            **overlapping(q_NHD.device),
        )  # fmt: skip


def span(
    q_NHD: Tensor, cache: tuple[Tensor, Tensor], out_NHD: Tensor, tile_S4: Tensor, table_LM: Tensor, scale: float,
    window: int | None,
) -> None:  # fmt: skip
    """Causal attention of pieces of prompts, SPAN tokens at most in each tile: (first row, rows, position of the first,
    line of the table)."""
    (_, heads, size), (_, block, kv_heads, _) = q_NHD.shape, cache[0].shape
    _span_kernel[(len(tile_S4), heads)](
        q_NHD, *cache, out_NHD, tile_S4, table_LM, table_LM.shape[1], heads, kv_heads, window or _NO_WINDOW, scale,
        GROUP=heads // kv_heads, SIZE=size, BLOCK=block, QUERIES=SPAN, KEYS=_KEYS, num_warps=4,
        **overlapping(q_NHD.device),
    )  # fmt: skip
