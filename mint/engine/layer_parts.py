"""What a layer of training is made of, as functions of tensors: linears with what an adapter adds to them, norms,
rotary embedding, the gate. `mint.engine.layers` puts them together.

Shapes: T packed tokens, H query heads, K key/value heads, D head size, I inputs and O outputs of linears, R ranks of
the adapted ones together, G width of the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Owners(NamedTuple):
    """Whose rows are whose, where several adapters share a pass: each one's together, in order."""

    owner_T: Tensor
    starts: Tensor
    """Where each one's rows begin, and where the last one's end."""


class LowRank(NamedTuple):
    """What an adapter adds to a linear: up (down x)."""

    down: Tensor
    """[R, in], the adapter's scale in it."""
    up: Tensor
    """[out, R]"""
    owners: Owners | None = None
    """If given, both are of several adapters: [G, R, in] and [G, out, R]."""


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    together: Tensor | None = None
    """With the weights of the linears it is computed with below it, where they lie so in memory."""


class Norm(NamedTuple):
    """x / rms(x) * weight"""

    weight: Tensor
    plus_one: bool
    """The weight is stored less 1, and multiplied in float32."""
    eps: float


def project(x_TI: Tensor, linears: Sequence[Linear], added: Sequence[LowRank | None]) -> Tensor:
    """Linears with one input as one product, their outputs side by side, what the adapter adds included."""
    if not any(added):
        return _joined([F.linear(x_TI, linear.weight, linear.bias) for linear in linears], dim=-1)
    weight_OI, bias_O = side_by_side(linears)
    ours = [low for low in added if low is not None]
    if (owners := ours[0].owners) is not None:
        assert len(ours) == len(linears), "adapters that share a pass are on all linears of a product, or on none"
        down_GRI, up_GOr = _joined([low.down for low in ours], dim=1), _joined([low.up for low in ours], dim=1)
        sizes = tuple(len(linear.weight) for linear in linears)
        return _ProjectOwned.apply(x_TI, weight_OI, bias_O, down_GRI, up_GOr, *owners, sizes)
    down_RI = torch.cat([low.down for low in ours]).to(x_TI.dtype)
    none = weight_OI.new_zeros(0)
    up_OR = torch.block_diag(
        *(none.reshape(len(w), 0) if low is None else low.up for (w, *_), low in zip(linears, added, strict=True))
    ).to(x_TI.dtype)
    return _Project.apply(x_TI, weight_OI, bias_O, down_RI, up_OR)


def side_by_side(linears: Sequence[Linear]) -> tuple[Tensor, Tensor | None]:
    weight_OI, bias_O = linears[0].together, None
    if weight_OI is None:
        weight_OI = _joined([linear.weight for linear in linears])
    if any(linear.bias is not None for linear in linears):
        bias_O = torch.cat([weight_OI.new_zeros(len(w)) if bias is None else bias for w, bias, _ in linears])
    return weight_OI, bias_O


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim)


class _Project(torch.autograd.Function):
    """x W^T + z up^T with z = down x. A product is not written twice: the smaller of its two sides gets columns of its
    own for what the adapter adds, [x, z] @ [W, up]^T or, backward, [grad, grad of z] @ [W; down]."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, down_RI: Tensor, up_OR: Tensor
    ) -> Tensor:
        z_TR = x_TI @ down_RI.T
        if widens(weight_OI):
            both = widened(x_TI, z_TR)
            ctx.save_for_backward(both, None, weight_OI, down_RI, up_OR)
            return F.linear(both, torch.cat([weight_OI, up_OR], dim=1), bias_O)
        ctx.save_for_backward(x_TI, z_TR, weight_OI, down_RI, up_OR)
        return F.linear(x_TI, weight_OI, bias_O) + z_TR @ up_OR.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,) = grads
        x_TI, z_TR, weight_OI, down_RI, up_OR = ctx.saved_tensors
        if z_TR is None:
            x_TI, z_TR = apart(x_TI, weight_OI)
        grad_TI, grad_TR = inputs_back(grad_TO, weight_OI, down_RI, up_OR, ctx.needs_input_grad[0])
        return grad_TI, None, None, grad_TR.T @ x_TI, grad_TO.T @ z_TR


class _ProjectOwned(torch.autograd.Function):
    """The same where rows have adapters of their own (`mint.engine.kernels.owned_rows`)."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, down_GRI: Tensor, up_GOr: Tensor,
        owner_T: Tensor, starts: Tensor, sizes: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        z_TR = torch.ops.mint.owned_shrink(x_TI, down_GRI, owner_T, sizes, False)
        ctx.save_for_backward(x_TI, z_TR, weight_OI, down_GRI, up_GOr, owner_T, starts)
        ctx.sizes = sizes
        return torch.ops.mint.owned_add(F.linear(x_TI, weight_OI, bias_O), z_TR, up_GOr, owner_T, sizes, True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TO,), sizes = grads, ctx.sizes
        x_TI, z_TR, weight_OI, down_GRI, up_GOr, owner_T, starts = ctx.saved_tensors
        grad_TR = torch.ops.mint.owned_shrink(grad_TO, up_GOr, owner_T, sizes, True)
        grad_TI = None
        if ctx.needs_input_grad[0]:
            grad_TI = torch.ops.mint.owned_add(grad_TO @ weight_OI, grad_TR, down_GRI, owner_T, sizes, False)
        grad_down = torch.ops.mint.owned_sums(x_TI, grad_TR, starts, sizes, False)
        grad_up = torch.ops.mint.owned_sums(grad_TO, z_TR, starts, sizes, True)
        return grad_TI, None, None, grad_down, grad_up, None, None, None


def apart(both: Tensor, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """x and z of [x, z]."""
    inputs = weight_OI.shape[1]
    return both[:, :inputs], both[:, inputs:]


def inputs_back(
    grad_TO: Tensor, weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradients of x, if wanted, and of z."""
    if wanted and widens(weight_OI):
        grad_TI, grad_TR = apart(grad_TO @ _beside(weight_OI, up_OR), weight_OI)
        # Not addmm, which would copy first: compiled, the sum joins what comes next.
        return grad_TI + grad_TR @ down_RI, grad_TR
    grad_TR = grad_TO @ up_OR
    if not wanted:
        return None, grad_TR
    return torch.cat([grad_TO, grad_TR], dim=1) @ torch.cat([weight_OI, down_RI]), grad_TR


def widens(weight_OI: Tensor) -> bool:
    return weight_OI.shape[0] >= weight_OI.shape[1]


def widened(x_TI: Tensor, z_TR: Tensor) -> Tensor:
    """[x, z]"""
    if x_TI.is_cuda:
        return torch.ops.mint.widen(x_TI, z_TR)
    return torch.cat([x_TI, z_TR], dim=1)


def _beside(weight_OI: Tensor, up_OR: Tensor) -> Tensor:
    """[W, up]; on a GPU with its columns end to end, which makes the product with it a tenth faster."""
    if weight_OI.is_cuda:
        return torch.cat([weight_OI.T, up_OR.T]).T
    return torch.cat([weight_OI, up_OR], dim=1)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.plus_one:
        return (wide * (1 + norm.weight.float())).to(x.dtype)
    return wide.to(x.dtype) * norm.weight


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    left, right = x_THD.chunk(2, dim=-1)
    return x_THD * cos_TD[:, None] + torch.cat((-right, left), dim=-1) * sin_TD[:, None]


def turn_heads(
    x_TO: Tensor, norms: tuple[Norm, Norm] | None, cos_TD: Tensor, sin_TD: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D] and k [T, K, D], normed where the family does that, and rotated; v [T, K, D]."""
    head_dim = cos_TD.shape[1]
    parts = x_TO.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in parts)
    if norms is not None:
        q, k = rms_norm(q, norms[0]), rms_norm(k, norms[1])
    return rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD), v


def gate(act: Callable[[Tensor], Tensor], x_TG: Tensor) -> Tensor:
    """act(gate) * up, of gate and up side by side."""
    gate, up = x_TG.chunk(2, dim=-1)
    return act(gate) * up


def heads_of(
    x_TI: Tensor,
    linears: Sequence[Linear],
    added: Sequence[LowRank | None],
    norms: tuple[Norm, Norm] | None,
    cos_TD: Tensor,
    sin_TD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the inputs, as `turn_heads` gives them."""
    heads, kv_heads, _ = (len(linear.weight) // cos_TD.shape[1] for linear in linears)
    return turn_heads(project(x_TI, linears, added), norms, cos_TD, sin_TD, heads, kv_heads)


def mlp(
    act: Callable[[Tensor], Tensor], x_TI: Tensor, linears: Sequence[Linear], added: Sequence[LowRank | None]
) -> Tensor:
    """down(act(gate x) * up x); the linears are gate, up and down."""
    return project(gate(act, project(x_TI, linears[:2], added[:2])), linears[2:], added[2:])
