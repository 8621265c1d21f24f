"""`mint.engine.layer_parts` on a GPU: heads, with the product they come from, and the gate in kernels of our own.

The kernel that makes the gradient of that product has it at hand for the gradient of the adapter's second matrices,
which would otherwise read all of it once more. For the gate the same was slower: three sums of a tile leave too few
tiles under way.

Shapes: T packed tokens, D head size, I inputs and O outputs of linears, R ranks of the adapted ones together, r the
rank of one, G width of the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.kernels import node_attention, owned_rows, training  # noqa: F401  (they make the operators known)
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
    return project(_SiluGate.apply(project(x_TI, linears[:2], added[:2])), linears[2:], added[2:])


def _joined(x_TI: Tensor, linears: Sequence[Linear], added: Sequence[LowRank | None]) -> tuple[Any, ...] | None:
    """The first arguments of `_Heads`; None where the adapter is not on all of the linears, of too high a rank or one
    of several."""
    ours = [low for low in added if low is not None]
    weight_OI, bias_O = side_by_side(linears)
    if len(ours) < len(linears) or not widens(weight_OI) or ours[0].owners or ours[0].up.shape[1] > MOST_RANK:
        return None
    down_RI, up_Or = torch.cat([low.down for low in ours]), torch.cat([low.up for low in ours])
    return x_TI, weight_OI, bias_O, down_RI, up_Or, tuple(len(linear.weight) for linear in linears)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, down_RI: Tensor, up_Or: Tensor,
        sizes: tuple[int, ...], weight_2D: Tensor | None, cos_TD: Tensor, sin_TD: Tensor, heads: int, kv_heads: int,
        eps: float, plus: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        up_OR = torch.block_diag(*up_Or.split(sizes))
        both = widened(x_TI, x_TI @ down_RI.T)
        x_TO = F.linear(both, torch.cat([weight_OI, up_OR], dim=1), bias_O)
        ctx.save_for_backward(both, weight_OI, down_RI, up_OR, x_TO, weight_2D, cos_TD, sin_TD)
        ctx.turn = heads, kv_heads, eps, plus
        return torch.ops.mint.turn_heads(x_TO, weight_2D, cos_TD, sin_TD, heads, kv_heads, eps, plus)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        both, weight_OI, down_RI, up_OR, *turned = ctx.saved_tensors
        grad_TO, up = torch.ops.mint.turn_heads_back(*grads, *turned, *ctx.turn, both, down_RI.shape[0] // 3)
        grad_TI, grad_TR = inputs_back(grad_TO, weight_OI, down_RI, up_OR, ctx.needs_input_grad[0])
        x_TI, _ = apart(both, weight_OI)
        return grad_TI, None, None, grad_TR.T @ x_TI, up.sum(0).to(up_OR.dtype), *[None] * 8


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TG: Tensor) -> Tensor:
        ctx.save_for_backward(x_TG)
        return gate(F.silu, x_TG)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x_TG,) = ctx.saved_tensors
        return torch.ops.mint.silu_gate_back(grads[0], x_TG)
