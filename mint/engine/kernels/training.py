"""Kernels of a training pass: what stands between a layer's products, each read and written once.

A compiler of elementwise code computes a normed and rotated head in two passes that each look at both halves of it, and
the gradient of gate and up once for each of them. Both are known to the compiler as operators it does not look into.

Shapes: T rows, H query heads, K key/value heads, D head size, G width of the gate, I inputs, R rank, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
_COLUMNS = 1024
_LOGITS = 8192
# Programs that share the rows where something is summed over them: constant, so that sums have an order.
STRIPES = 16


@triton.jit
def _half(ptr, at, mask):
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _turn_kernel(
    x_ptr, q_ptr, k_ptr, v_ptr, weight_ptr, cos_ptr, sin_ptr, rows, eps, H: tl.constexpr, K: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (d < HALF)
    D: tl.constexpr = 2 * HALF
    x_at = (row * (H + 2 * K) + head) * D + d
    left, right = _half(x_ptr, x_at, mask), _half(x_ptr, x_at + HALF, mask)
    if head >= H + K:
        at = (row * K + head - H - K) * D + d
        tl.store(v_ptr + at, left.to(v_ptr.dtype.element_ty), mask=mask)
        tl.store(v_ptr + at + HALF, right.to(v_ptr.dtype.element_ty), mask=mask)
    else:
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / D + eps)[:, None]
            w_at = (head >= H).to(tl.int32) * D + d
            left = left * scale * (_half(weight_ptr, w_at, d < HALF) + PLUS)
            right = right * scale * (_half(weight_ptr, w_at + HALF, d < HALF) + PLUS)
        t_at = row * D + d
        out_left = left * _half(cos_ptr, t_at, mask) - right * _half(sin_ptr, t_at, mask)
        out_right = right * _half(cos_ptr, t_at + HALF, mask) + left * _half(sin_ptr, t_at + HALF, mask)
        if head < H:
            at = (row * H + head) * D + d
            tl.store(q_ptr + at, out_left.to(q_ptr.dtype.element_ty), mask=mask)
            tl.store(q_ptr + at + HALF, out_right.to(q_ptr.dtype.element_ty), mask=mask)
        else:
            at = (row * K + head - H) * D + d
            tl.store(k_ptr + at, out_left.to(k_ptr.dtype.element_ty), mask=mask)
            tl.store(k_ptr + at + HALF, out_right.to(k_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gathered(total, grad, z_ptr, z_at, row, rows, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """The total [columns, BLOCK_R] and the sum over rows of grad [rows, columns] times z."""
    r = tl.arange(0, BLOCK_R)[None, :]
    z = tl.load(z_ptr + z_at + r, mask=(row < rows) & (r < RANK), other=0.0)
    return tl.dot(tl.trans(grad.to(z.dtype)), z, total)


@triton.jit
def _put_sums(ptr, total, column, columns, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    r = tl.arange(0, BLOCK_R)[None, :]
    tl.store(ptr + column[:, None] * RANK + r, total, mask=(column < columns)[:, None] & (r < RANK))


@triton.jit(do_not_specialize=["rows", "per"])
def _turn_back_kernel(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, dx_ptr, weight_ptr, cos_ptr, sin_ptr, wide_ptr, up_ptr, rows, per, width, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
    PLUS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    head, stripe = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)[None, :]
    D: tl.constexpr = 2 * HALF
    part = (head >= H).to(tl.int32) + (head >= H + K).to(tl.int32)  # which of q, k and v
    sum_left, sum_right = tl.zeros([BLOCK, BLOCK_R], tl.float32), tl.zeros([BLOCK, BLOCK_R], tl.float32)
    for start in range(stripe * per, tl.minimum(rows, (stripe + 1) * per), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (d < HALF)
        x_at = (row * (H + 2 * K) + head) * D + d
        if head >= H + K:
            at = (row * K + head - H - K) * D + d
            d_left, d_right = _half(dv_ptr, at, mask), _half(dv_ptr, at + HALF, mask)
        else:
            if head < H:
                at = (row * H + head) * D + d
                left, right = _half(dq_ptr, at, mask), _half(dq_ptr, at + HALF, mask)
            else:
                at = (row * K + head - H) * D + d
                left, right = _half(dk_ptr, at, mask), _half(dk_ptr, at + HALF, mask)
            t_at = row * D + d
            d_left = left * _half(cos_ptr, t_at, mask) + right * _half(sin_ptr, t_at + HALF, mask)
            d_right = right * _half(cos_ptr, t_at + HALF, mask) - left * _half(sin_ptr, t_at, mask)
            if NORM:
                x_left, x_right = _half(x_ptr, x_at, mask), _half(x_ptr, x_at + HALF, mask)
                squares = tl.sum(x_left * x_left, axis=1) + tl.sum(x_right * x_right, axis=1)
                scale = 1.0 / tl.sqrt(squares / D + eps)[:, None]
                x_left, x_right = x_left * scale, x_right * scale
                w_at = (head >= H).to(tl.int32) * D + d
                d_left = d_left * (_half(weight_ptr, w_at, d < HALF) + PLUS)
                d_right = d_right * (_half(weight_ptr, w_at + HALF, d < HALF) + PLUS)
                along = ((tl.sum(d_left * x_left, axis=1) + tl.sum(d_right * x_right, axis=1)) / D)[:, None]
                d_left = (d_left - x_left * along) * scale
                d_right = (d_right - x_right * along) * scale
        tl.store(dx_ptr + x_at, d_left.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(dx_ptr + x_at + HALF, d_right.to(dx_ptr.dtype.element_ty), mask=mask)
        if RANK > 0:
            z_at = row * width + width - (3 - part) * RANK
            sum_left = _gathered(sum_left, d_left, wide_ptr, z_at, row, rows, RANK, BLOCK_R)
            sum_right = _gathered(sum_right, d_right, wide_ptr, z_at, row, rows, RANK, BLOCK_R)
    if RANK > 0:
        column = tl.arange(0, BLOCK)
        up_ptr += (stripe * (H + 2 * K) + head) * D * RANK
        _put_sums(up_ptr, sum_left, column, HALF, RANK, BLOCK_R)
        _put_sums(up_ptr + HALF * RANK, sum_right, column, HALF, RANK, BLOCK_R)


def _heads(head_dim: int, heads: int, kv_heads: int, plus: float, norm: bool) -> dict[str, Any]:
    half = head_dim // 2
    block = max(16, triton.next_power_of_2(half))
    return {"H": heads, "K": kv_heads, "HALF": half, "BLOCK": block, "ROWS": _ROWS, "NORM": norm, "PLUS": plus}


def _stripes(rows: int, step: int) -> int:
    """Rows of one of `STRIPES` programs, in whole steps."""
    return triton.cdiv(triton.cdiv(rows, STRIPES), step) * step


def _ranks(rank: int) -> dict[str, int]:
    return {"RANK": rank, "BLOCK_R": max(16, triton.next_power_of_2(rank))}


@torch.library.custom_op(
    "mint::turn_heads",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor x, Tensor? weight, Tensor cos, Tensor sin, int heads, int kv_heads, float eps, float plus)"
    " -> (Tensor, Tensor, Tensor)",
)
def turn_heads(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float, plus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D] and k [T, K, D], normed and rotated, and v [T, K, D], of x [T, (H + 2 K) D]. `weight` [2, D]: of the
    norms of q and k, less `plus`; None: no norms."""
    rows, head_dim = len(x), cos.shape[1]
    q, k, v = (x.new_empty(rows, count, head_dim) for count in (heads, kv_heads, kv_heads))
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    _turn_kernel[(heads + 2 * kv_heads, triton.cdiv(rows, _ROWS))](
        x, q, k, v, x if weight is None else weight, cos, sin, rows, eps,
        **_heads(head_dim, heads, kv_heads, plus, weight is not None),
    )  # fmt: skip
    return q, k, v


@turn_heads.register_fake
def _(x: Tensor, weight: Any, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, eps: float, plus: float) -> Any:
    return tuple(x.new_empty(x.shape[0], count, cos.shape[1]) for count in (heads, kv_heads, kv_heads))


@torch.library.custom_op(
    "mint::turn_heads_back",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor x, Tensor? weight, Tensor cos, Tensor sin, int heads, "
    "int kv_heads, float eps, float plus, Tensor? wide, SymInt rank) -> (Tensor, Tensor)",
)
def turn_heads_back(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, heads: int,
    kv_heads: int, eps: float, plus: float, wide: Tensor | None, rank: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x; and, where x comes from a product with `wide` [T, I + 3 rank] that ends in what an adapter
    makes of the inputs for q, k and v, of the adapter's matrices behind that, [STRIPES, (H + 2 K) D, rank], to be
    summed."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    up = x.new_empty(STRIPES, x.shape[1], rank, dtype=torch.float32)
    dq, dk, dv, x, cos, sin = (tensor.contiguous() for tensor in (dq, dk, dv, x, cos, sin))
    wide = x if wide is None else wide.contiguous()
    _turn_back_kernel[(heads + 2 * kv_heads, STRIPES)](
        dq, dk, dv, x, dx, x if weight is None else weight, cos, sin, wide, up, len(x), _stripes(len(x), _ROWS),
        wide.shape[1], eps, **_ranks(rank),
        **_heads(cos.shape[1], heads, kv_heads, plus, weight is not None),
    )  # fmt: skip
    return dx, up


@turn_heads_back.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    up = x.new_empty(STRIPES, x.shape[1], rest[-1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), up


def _save_turn(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, cos, sin, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, cos, sin)


def _turn_back(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cos, sin = ctx.saved_tensors
    dx, _ = torch.ops.mint.turn_heads_back(dq, dk, dv, x, weight, cos, sin, *ctx.rest, None, 0)
    return dx, *[None] * 7


turn_heads.register_autograd(_turn_back, setup_context=_save_turn)


@triton.jit
def _gate_back_kernel(grad_ptr, x_ptr, dx_ptr, G: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < G
    at = row * 2 * G + column
    grad = _half(grad_ptr, row * G + column, mask)
    gate, up = _half(x_ptr, at, mask), _half(x_ptr, at + G, mask)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dx_ptr + at, d_gate.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx_ptr + at + G, (grad * gate * sigmoid).to(dx_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op(
    "mint::silu_gate_back", mutates_args=(), device_types="cuda", schema="(Tensor grad, Tensor x) -> Tensor"
)
def silu_gate_back(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x [T, 2 G], gate and up side by side, from that of silu(gate) * up [T, G]."""
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    width = grad.shape[1]
    _gate_back_kernel[(len(x), triton.cdiv(width, _COLUMNS))](grad, x, dx, G=width, COLUMNS=_COLUMNS)
    return dx


@silu_gate_back.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@triton.jit
def _widen_kernel(x_ptr, z_ptr, out_ptr, inputs, rank, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    of_x, of_z = column < inputs, (column >= inputs) & (column < inputs + rank)
    x = _half(x_ptr, row * inputs + column, of_x)
    z = _half(z_ptr, row * rank + column - inputs, of_z)
    out = tl.where(of_x, x, z).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * (inputs + rank) + column, out, mask=of_x | of_z)


@torch.library.custom_op("mint::widen", mutates_args=(), device_types="cuda", schema="(Tensor x, Tensor z) -> Tensor")
def widen(x: Tensor, z: Tensor) -> Tensor:
    """[x, z] of x [T, I] and z [T, R]."""
    x, z = x.contiguous(), z.contiguous()
    (rows, inputs), rank = x.shape, z.shape[1]
    out = x.new_empty(rows, inputs + rank)
    columns = triton.next_power_of_2(inputs + rank)
    warps = 4 if columns <= 4096 else 8
    _widen_kernel[(rows,)](x, z, out, inputs, rank, COLUMNS=columns, num_warps=warps)
    return out


@widen.register_fake
def _(x: Tensor, z: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] + z.shape[1])


@triton.jit
def _bent(x, temperature, cap, CAPPED: tl.constexpr):
    """A logit as the softmax sees it, and the slope of the softcap."""
    slope = 1.0
    if CAPPED:
        tanh = 2.0 / (1.0 + tl.exp(-2.0 * x / cap)) - 1.0
        slope = 1.0 - tanh * tanh
        x = tanh * cap
    return x / temperature, slope


@triton.jit
def _powers_kernel(
    x_ptr, sum_ptr, largest_ptr, vocabulary, temperature, cap, CAPPED: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * vocabulary
    column = tl.arange(0, COLUMNS)
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        x = tl.load(x_ptr + start + column, mask=start + column < vocabulary, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, x)
    largest, _ = _bent(tl.max(highest, axis=0), temperature, cap, CAPPED)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        mask = start + column < vocabulary
        x = tl.load(x_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        logit, slope = _bent(x, temperature, cap, CAPPED)
        power = tl.where(mask, tl.exp(logit - largest), 0.0)
        total += power
        tl.store(x_ptr + start + column, (power * slope).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(sum_ptr + row, tl.sum(total, axis=0))
    tl.store(largest_ptr + row, largest)


def powers(products: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logit - largest), times the slope of the softcap, in the place of the products [T, V]; its sum without
    [T, 1]; the largest [T, 1]. The second look at a row finds it in the cache, as few rows are under way at once."""
    rows, vocabulary = products.shape
    total, largest = (torch.empty(rows, 1, dtype=torch.float32, device=products.device) for _ in range(2))
    columns = min(_LOGITS, triton.next_power_of_2(vocabulary))
    _powers_kernel[(rows,)](
        products, total, largest, vocabulary, temperature, softcap or 1.0, CAPPED=softcap is not None,
        COLUMNS=columns, num_warps=max(1, columns // 256),
    )  # fmt: skip
    return products, total, largest
