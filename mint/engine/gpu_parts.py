"""`mint.engine.layer_parts` on a GPU: heads and the MLP with the products around them, in kernels of our own.

Taken together, the kernel that makes the gradient of a product has it at hand for the gradients of the adapter's
matrices, which otherwise read all of it once more.

Shapes: T packed tokens, D head size, I inputs and O outputs of linears, R ranks of the adapted ones together, r the
rank of one, G width of the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.kernels import node_attention, training  # noqa: F401  (they make the operators known)
from mint.engine.layer_parts import (
    Linear,
    LowRank,
    Norm,
    apart,
    gate,
    inputs_back,
    project,
    side_by_side,
    widened,
    widens,
)

# Beyond this the sums of a tile do not fit into its registers.
MOST_RANK = 64


def heads_of(
    x_TI: Tensor,
    linears: Sequence[Linear],
    added: Sequence[LowRank | None],
    norms: tuple[Norm, Norm] | None,
    cos_TD: Tensor,
    sin_TD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, _ = (len(linear.weight) // cos_TD.shape[1] for linear in linears)
    weight_2D, eps, plus = None, 0.0, 0.0
    if norms is not None:
        weight_2D = torch.stack([norm.weight for norm in norms])
        eps, plus = norms[0].eps, 1.0 if norms[0].plus_one else 0.0
    if (given := _joined(x_TI, linears, added)) is None:
        x_TO = project(x_TI, linears, added)
        return torch.ops.mint.turn_heads(x_TO, weight_2D, cos_TD, sin_TD, heads, kv_heads, eps, plus)
    return _Heads.apply(*given, weight_2D, cos_TD, sin_TD, heads, kv_heads, eps, plus)


def silu_mlp(
    act: Callable[[Tensor], Tensor], x_TI: Tensor, linears: Sequence[Linear], added: Sequence[LowRank | None]
) -> Tensor:
    """For an `act` that is silu."""
    given, behind = _joined(x_TI, linears[:2], added[:2]), added[2]
    if given is None or behind is None:
        return project(_SiluGate.apply(project(x_TI, linears[:2], added[:2])), linears[2:], added[2:])
    return _SiluMlp.apply(*given, *linears[2], behind.down, behind.up)


def _joined(x_TI: Tensor, linears: Sequence[Linear], added: Sequence[LowRank | None]) -> tuple[Any, ...] | None:
    """What `_product` wants; None where an adapter does not sit on all of the linears, or not as it should."""
    ours = [low for low in added if low is not None]
    weight_OI, bias_O = side_by_side(linears)
    if len(ours) < len(linears) or not widens(weight_OI) or ours[0].up.shape[1] > MOST_RANK:
        return None
    down_RI, up_Or = torch.cat([low.down for low in ours]), torch.cat([low.up for low in ours])
    return x_TI, weight_OI, bias_O, down_RI, up_Or, ours[0].scale, tuple(len(linear.weight) for linear in linears)


def _product(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    down_RI: Tensor,
    up_Or: Tensor,
    scale: Tensor,
    sizes: tuple[int, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """[x, z], its product with [W, up]^T, and up as it is there: that of each linear a block."""
    up_OR = torch.block_diag(*up_Or.split(sizes))
    both = widened(x_TI, x_TI @ down_RI.T, scale)
    return both, F.linear(both, torch.cat([weight_OI, up_OR], dim=1), bias_O), up_OR


def _product_back(
    grad_TO: Tensor, up: Tensor, both: Tensor, weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: Tensor,
    wanted: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Of what `_product` was given; `up`: the gradient of the adapter's second matrices, to be summed."""
    grad_TI, grad_TR = inputs_back(grad_TO, weight_OI, down_RI, up_OR, scale, wanted)
    return grad_TI, None, None, grad_TR.T @ apart(both, weight_OI)[0], up.sum(0).to(up_OR.dtype), None, None


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, down_RI: Tensor, up_Or: Tensor, scale: Tensor,
        sizes: tuple[int, ...], weight_2D: Tensor | None, cos_TD: Tensor, sin_TD: Tensor, heads: int, kv_heads: int,
        eps: float, plus: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        both, x_TO, up_OR = _product(x_TI, weight_OI, bias_O, down_RI, up_Or, scale, sizes)
        ctx.save_for_backward(both, weight_OI, down_RI, up_OR, scale, x_TO, weight_2D, cos_TD, sin_TD)
        ctx.turn = heads, kv_heads, eps, plus
        return torch.ops.mint.turn_heads(x_TO, weight_2D, cos_TD, sin_TD, heads, kv_heads, eps, plus)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        both, weight_OI, down_RI, up_OR, scale, *turned = ctx.saved_tensors
        rank = down_RI.shape[0] // 3
        grad_TO, up = torch.ops.mint.turn_heads_back(*grads, *turned, *ctx.turn, both, rank)
        found = _product_back(grad_TO, up, both, weight_OI, down_RI, up_OR, scale, ctx.needs_input_grad[0])
        return *found, *[None] * 7


class _SiluMlp(torch.autograd.Function):
    """What the gate lets through is not kept for the backward pass: the kernel that needs gate and up makes it anew."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, down_RI: Tensor, up_Or: Tensor, scale: Tensor,
        sizes: tuple[int, ...], weight_IG: Tensor, bias_I: Tensor | None, down_rG: Tensor, up_Ir: Tensor,
    ) -> Tensor:  # fmt: skip
        both, x_TO, up_OR = _product(x_TI, weight_OI, bias_O, down_RI, up_Or, scale, sizes)
        x_TG = gate(F.silu, x_TO)
        z_Tr = x_TG @ down_rG.T * scale
        ctx.save_for_backward(both, weight_OI, down_RI, up_OR, scale, x_TO, z_Tr, weight_IG, down_rG, up_Ir)
        return F.linear(x_TG, weight_IG, bias_I) + z_Tr @ up_Ir.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TI,) = grads
        both, weight_OI, down_RI, up_OR, scale, x_TO, z_Tr, weight_IG, down_rG, up_Ir = ctx.saved_tensors
        grad_Tr = (grad_TI @ up_Ir) * scale
        grad_TO, up, down = torch.ops.mint.silu_mlp_back(grad_TI @ weight_IG, grad_Tr, down_rG, x_TO, both)
        found = _product_back(grad_TO, up, both, weight_OI, down_RI, up_OR, scale, ctx.needs_input_grad[0])
        return *found, None, None, down.sum(0).T.to(down_rG.dtype), grad_TI.T @ z_Tr


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TG: Tensor) -> Tensor:
        ctx.save_for_backward(x_TG)
        return gate(F.silu, x_TG)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x_TG,) = ctx.saved_tensors
        return torch.ops.mint.silu_gate_back(grads[0], x_TG)
