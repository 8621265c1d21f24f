"""Attention over packed nodes, forward and backward, in kernels of our own: any lengths, in one launch each.

A node's queries look at its keys up to their own place, their ends lined up, and no further back than the window. Where
all nodes are of one length cuDNN is faster; for lengths that differ torch makes a plan anew at every call, which takes
70 ms and cannot be recorded, and its flash attention 2 does not use this generation of tensor cores.

Shapes: T rows of queries, S rows of keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Queries and keys of a tile, warps, stages of loading ahead.
_FORWARD = (64, 32, 4, 3)
_QUERIES = (64, 32, 4, 2)
_KEYS = (32, 64, 4, 2)
# Less than any logit, and finite: a row of a tile may see none of its keys.
_UNSEEN = tl.constexpr(-1e30)


@triton.jit
def _tile(ptr, index, count, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of one head, [index, BLOCK_D]; zeros beyond the count and beyond D."""
    d = tl.arange(0, BLOCK_D)
    at = ptr + index[:, None] * STRIDE + d[None, :]
    if MASKED:
        return tl.load(at, mask=(index < count)[:, None] & (d < D)[None, :], other=0.0)
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _put(ptr, index, count, values, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = ptr + index[:, None] * STRIDE + d[None, :]
    tl.store(at, values.to(ptr.dtype.element_ty), mask=(index < count)[:, None] & (d < D)[None, :])


@triton.jit
def _span(starts_ptr, node):
    start = tl.load(starts_ptr + node)
    return start, tl.load(starts_ptr + node + 1) - start


@triton.jit
def _seen(query, key, keys, window, WINDOW: tl.constexpr):
    """Whether a query, by the place it has among the keys, looks at a key."""
    seen = (key <= query) & (key < keys)
    if WINDOW:
        seen = seen & (key > query - window)
    return seen


@triton.jit
def _look(
    acc, total, top, q, k_ptr, v_ptr, query, key, keys, scale, window, STRIDE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = _tile(k_ptr, key, keys, STRIDE, D, BLOCK_D, MASKED)
    logit = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        logit = tl.where(_seen(query[:, None], key[None, :], keys, window, WINDOW), logit, _UNSEEN)
    higher = tl.maximum(top, tl.max(logit, axis=1))
    power = tl.exp2(logit - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(power, axis=1)
    v = _tile(v_ptr, key, keys, STRIDE, D, BLOCK_D, MASKED)
    acc = tl.dot(power.to(v.dtype), v, acc * shrink[:, None])
    return acc, total, higher


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, query_starts_ptr, key_starts_ptr, rows, scale, window, H: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    head, node = tl.program_id(0), tl.program_id(1)
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * QUERIES  # those with most to look at first
    query_start, queries = _span(query_starts_ptr, node)
    key_start, keys = _span(key_starts_ptr, node)
    if first < queries:
        above = keys - queries
        index, step = first + tl.arange(0, QUERIES), tl.arange(0, KEYS)
        q_at = (query_start.to(tl.int64) * H + head) * D
        k_at = (key_start.to(tl.int64) * K + head // (H // K)) * D
        q = _tile(q_ptr + q_at, index, queries, H * D, D, BLOCK_D, True)
        acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
        total, top = tl.zeros([QUERIES], tl.float32), tl.full([QUERIES], _UNSEEN, tl.float32)
        begin, whole = 0, (above + first + 1) // KEYS * KEYS
        if WINDOW:
            begin = tl.maximum(0, above + first - window + 1) // KEYS * KEYS
            whole = begin
        for at in range(begin, whole, KEYS):
            acc, total, top = _look(
                acc, total, top, q, k_ptr + k_at, v_ptr + k_at, above + index, at + step, keys, scale, window, K * D, D,
                BLOCK_D, WINDOW, False,
            )  # fmt: skip
        for at in range(whole, tl.minimum(keys, above + first + QUERIES), KEYS):
            acc, total, top = _look(
                acc, total, top, q, k_ptr + k_at, v_ptr + k_at, above + index, at + step, keys, scale, window, K * D, D,
                BLOCK_D, WINDOW, True,
            )  # fmt: skip
        _put(out_ptr + q_at, index, queries, acc / total[:, None], H * D, D, BLOCK_D)
        lse_at = lse_ptr + head.to(tl.int64) * rows + query_start + index
        tl.store(lse_at, top + tl.log2(total), mask=index < queries)


@triton.jit
def _add_to_queries(
    dq, q, do, lse, delta, k_ptr, v_ptr, query, key, keys, scale, window, STRIDE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k = _tile(k_ptr, key, keys, STRIDE, D, BLOCK_D, MASKED)
    v = _tile(v_ptr, key, keys, STRIDE, D, BLOCK_D, MASKED)
    power = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    if MASKED:
        power = tl.where(_seen(query[:, None], key[None, :], keys, window, WINDOW), power, 0.0)
    d_logit = power * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return tl.dot(d_logit.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["rows"])
def _queries_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, query_starts_ptr, key_starts_ptr, rows, scale,
    scale_2, window, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The gradient of q; and delta, the sum of out times its gradient, for the other kernel."""
    head, node = tl.program_id(0), tl.program_id(1)
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * QUERIES
    query_start, queries = _span(query_starts_ptr, node)
    key_start, keys = _span(key_starts_ptr, node)
    if first < queries:
        above = keys - queries
        index, step = first + tl.arange(0, QUERIES), tl.arange(0, KEYS)
        q_at = (query_start.to(tl.int64) * H + head) * D
        k_at = (key_start.to(tl.int64) * K + head // (H // K)) * D
        q = _tile(q_ptr + q_at, index, queries, H * D, D, BLOCK_D, True)
        do = _tile(do_ptr + q_at, index, queries, H * D, D, BLOCK_D, True)
        out = _tile(out_ptr + q_at, index, queries, H * D, D, BLOCK_D, True)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), axis=1)
        of_row = head.to(tl.int64) * rows + query_start + index
        tl.store(delta_ptr + of_row, delta, mask=index < queries)
        lse = tl.load(lse_ptr + of_row, mask=index < queries, other=0.0)
        dq = tl.zeros([QUERIES, BLOCK_D], tl.float32)
        begin, whole = 0, (above + first + 1) // KEYS * KEYS
        if WINDOW:
            begin = tl.maximum(0, above + first - window + 1) // KEYS * KEYS
            whole = begin
        for at in range(begin, whole, KEYS):
            dq = _add_to_queries(
                dq, q, do, lse, delta, k_ptr + k_at, v_ptr + k_at, above + index, at + step, keys, scale_2, window,
                K * D, D, BLOCK_D, WINDOW, False,
            )  # fmt: skip
        for at in range(whole, tl.minimum(keys, above + first + QUERIES), KEYS):
            dq = _add_to_queries(
                dq, q, do, lse, delta, k_ptr + k_at, v_ptr + k_at, above + index, at + step, keys, scale_2, window,
                K * D, D, BLOCK_D, WINDOW, True,
            )  # fmt: skip
        _put(dq_ptr + q_at, index, queries, dq * scale, H * D, D, BLOCK_D)


@triton.jit
def _add_to_keys(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, index, queries, above, key, keys, scale, window,
    STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    q = _tile(q_ptr, index, queries, STRIDE, D, BLOCK_D, MASKED)
    do = _tile(do_ptr, index, queries, STRIDE, D, BLOCK_D, MASKED)
    if MASKED:
        lse = tl.load(lse_ptr + index, mask=index < queries, other=0.0)
        delta = tl.load(delta_ptr + index, mask=index < queries, other=0.0)
    else:
        lse, delta = tl.load(lse_ptr + index), tl.load(delta_ptr + index)
    power = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    if MASKED:
        seen = _seen((above + index)[None, :], key[:, None], keys, window, WINDOW) & (index < queries)[None, :]
        power = tl.where(seen, power, 0.0)
    dv = tl.dot(power.to(do.dtype), do, dv)
    d_logit = power * (tl.dot(v, tl.trans(do)) - delta[None, :])
    dk = tl.dot(d_logit.to(q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["rows"])
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, query_starts_ptr, key_starts_ptr, rows, scale,
    scale_2, window, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v: sums over all query heads that share them."""
    kv_head, node, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * KEYS
    query_start, queries = _span(query_starts_ptr, node)
    key_start, keys = _span(key_starts_ptr, node)
    if first < keys:
        above = keys - queries
        key, step = first + tl.arange(0, KEYS), tl.arange(0, QUERIES)
        k_at = (key_start.to(tl.int64) * K + kv_head) * D
        k = _tile(k_ptr + k_at, key, keys, K * D, D, BLOCK_D, True)
        v = _tile(v_ptr + k_at, key, keys, K * D, D, BLOCK_D, True)
        dk, dv = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_D], tl.float32)
        begin, stop = tl.maximum(0, first - above) // QUERIES * QUERIES, queries
        # Between these every query of a tile sees every key of this one.
        low = (tl.maximum(0, first + KEYS - 1 - above) + QUERIES - 1) // QUERIES * QUERIES
        high = tl.maximum(low, queries // QUERIES * QUERIES)
        if WINDOW:
            stop = tl.minimum(queries, first + KEYS - 1 + window - above)
            high = low
        for member in range(H // K):
            head = kv_head * (H // K) + member
            q_at = (query_start.to(tl.int64) * H + head) * D
            row = head.to(tl.int64) * rows + query_start
            for at in range(begin, tl.minimum(low, stop), QUERIES):
                dk, dv = _add_to_keys(
                    dk, dv, k, v, q_ptr + q_at, do_ptr + q_at, lse_ptr + row, delta_ptr + row, at + step, queries,
                    above, key, keys, scale_2, window, H * D, D, BLOCK_D, WINDOW, True,
                )  # fmt: skip
            for at in range(low, high, QUERIES):
                dk, dv = _add_to_keys(
                    dk, dv, k, v, q_ptr + q_at, do_ptr + q_at, lse_ptr + row, delta_ptr + row, at + step, queries,
                    above, key, keys, scale_2, window, H * D, D, BLOCK_D, WINDOW, False,
                )  # fmt: skip
            for at in range(high, stop, QUERIES):
                dk, dv = _add_to_keys(
                    dk, dv, k, v, q_ptr + q_at, do_ptr + q_at, lse_ptr + row, delta_ptr + row, at + step, queries,
                    above, key, keys, scale_2, window, H * D, D, BLOCK_D, WINDOW, True,
                )  # fmt: skip
        _put(dk_ptr + k_at, key, keys, dk * scale, K * D, D, BLOCK_D)
        _put(dv_ptr + k_at, key, keys, dv, K * D, D, BLOCK_D)


def _constants(q: Tensor, k: Tensor, window: int, tile: tuple[int, int, int, int]) -> dict[str, Any]:
    queries, keys, warps, stages = tile
    head_dim = q.shape[2]
    return {
        "H": q.shape[1], "K": k.shape[1], "D": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "QUERIES": queries, "KEYS": keys, "WINDOW": window > 0, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


@torch.library.custom_op(
    "mint::node_attention",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor q, Tensor k, Tensor v, Tensor query_starts, Tensor key_starts, SymInt most_queries, "
    "SymInt most_keys, float scale, int window) -> (Tensor, Tensor)",
)
def node_attention(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, most_queries: int, most_keys: int,
    scale: float, window: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out [T, H, D] of q [T, H, D], k and v [S, K, D]; and the logarithm, to base 2, of the softmax's sums [H, T].
    `window`: 0 for none."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    grid = (q.shape[1], len(query_starts) - 1, triton.cdiv(most_queries, _FORWARD[0]))
    _forward_kernel[grid](
        q, k, v, out, lse, query_starts, key_starts, len(q), scale * math.log2(math.e), window,
        **_constants(q, k, window, _FORWARD),
    )  # fmt: skip
    return out, lse


@node_attention.register_fake
def _(q: Tensor, *_: Any) -> Any:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[1], q.shape[0], dtype=torch.float32
    )


@torch.library.custom_op(
    "mint::node_attention_back",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor query_starts, Tensor key_starts, "
    "SymInt most_queries, SymInt most_keys, float scale, int window) -> (Tensor, Tensor, Tensor)",
)
def node_attention_back(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, query_starts: Tensor, key_starts: Tensor,
    most_queries: int, most_keys: int, scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    do, q, k, v = do.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    nodes, scales = len(query_starts) - 1, (scale, scale * math.log2(math.e))
    _queries_kernel[(q.shape[1], nodes, triton.cdiv(most_queries, _QUERIES[0]))](
        q, k, v, out, do, lse, delta, dq, query_starts, key_starts, len(q), *scales, window,
        **_constants(q, k, window, _QUERIES),
    )  # fmt: skip
    _keys_kernel[(k.shape[1], nodes, triton.cdiv(most_keys, _KEYS[1]))](
        q, k, v, do, lse, delta, dk, dv, query_starts, key_starts, len(q), *scales, window,
        **_constants(q, k, window, _KEYS),
    )  # fmt: skip
    return dq, dk, dv


@node_attention_back.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, query_starts, key_starts, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, query_starts, key_starts)


def _back(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.mint.node_attention_back(do, *ctx.saved_tensors, *ctx.rest)
    return *grads, *[None] * 6


node_attention.register_autograd(_back, setup_context=_save)
