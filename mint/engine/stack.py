"""Several adapters of one shape side by side, for a training pass that they share.

Shapes: N adapters, P parameters of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mint.engine.layer_parts import LowRank, Owners
from mint.engine.lora import UNEMBEDDING, Adapter, Pair


class Stack:
    """Copies in the dtype the model computes in, each first matrix times its adapter's scale."""

    def __init__(self, like: Adapter, count: int, dtype: torch.dtype) -> None:
        """Room for `count` adapters of the shape of `like`."""
        self._scales_P = torch.ones_like(like.values_P)
        for down in like.shaped(self._scales_P)[::2]:
            down.fill_(like.scale)
        self._values_NP = torch.zeros(count, len(like.values_P), dtype=dtype, device=like.values_P.device)
        shapes = [tensor.shape for tensor in like.parameters()]
        parts = self._values_NP.split([shape.numel() for shape in shapes], dim=1)
        # Leaves of their own: gradients of parts of one tensor would each be as large as the whole.
        leaves = iter([part.unflatten(1, shape).requires_grad_() for part, shape in zip(parts, shapes, strict=True)])
        self.weights: dict[str, Pair] = {path: (next(leaves), next(leaves)) for path in like.paths}

    @torch.no_grad()
    def load(self, adapters: Sequence[Adapter]) -> None:
        for adapter, values_P in zip(adapters, self._values_NP, strict=False):
            torch.mul(adapter.values_P, self._scales_P, out=values_P)

    def low_ranks(self, owners: Owners) -> dict[str, LowRank]:
        """What they add to the rows each has, by the linears' paths."""
        layers = {path: pair for path, pair in self.weights.items() if path != UNEMBEDDING}
        return {path: LowRank(down, up, owners) for path, (down, up) in layers.items()}

    def gradients_of(self, total: Tensor, into: Tensor | None = None) -> Tensor:
        """[N, P] of the adapters' own values, in float32; where they go may be given."""
        leaves = [tensor for pair in self.weights.values() for tensor in pair]
        found = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
        return torch.mul(torch.cat([gradient.flatten(1) for gradient in found], dim=1), self._scales_P, out=into)
