"""The layers of a `FusedDecoder` in kernels: what `FusedDecoder.hidden` computes, for rows in tiles of one adapter.

Shapes: N rows (whole tiles), H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.fused import FusedDecoder, Projection
from mint.engine.kernels import rows as kernels
from mint.engine.kernels.rows import TILE, Adapters
from mint.engine.sampler.paged import BlockStore
from mint.engine.sampler.slots import AdapterSlots

# (queries, (keys, values), output to fill, scale, window)
AttendRows = Callable[[Tensor, tuple[Tensor, Tensor], Tensor, float, int | None], None]

HEAD_SIZES = {32, 64, 128, 256}
"""What the kernels are written for."""


@dataclass(frozen=True)
class PassRows:
    """The rows of one pass."""

    token_N: Tensor
    position_N: Tensor
    cache_slot_N: Tensor
    """Where keys and values go; -1: nowhere, a row that only fills a tile."""
    slot_of_tile: Tensor
    """Each tile's line in the adapters' tables."""
    attend: AttendRows


class KernelPass:
    def __init__(self, fused: FusedDecoder, store: BlockStore, slots: AdapterSlots, fixed_rows: int | None) -> None:
        """`fixed_rows`: matrix products are of this many rows, always (see `steady`)."""
        self._fused = fused
        self._store = store
        self._slots = slots
        self._fixed_rows = fixed_rows
        self._side: torch.cuda.Stream | None = None
        self._shape = (fused.num_heads, fused.num_kv_heads, fused.head_dim)

    @property
    def steady(self) -> bool:
        """No row's sums depend on how many there are."""
        return self._fixed_rows is not None

    def hidden(self, rows: PassRows) -> Tensor:
        """The final hidden states [N, H], after the last norm."""
        fused, adapters = self._fused, self._adapters(rows.slot_of_tile)
        residual_NH = F.embedding(rows.token_N, fused.embedding)
        x_NH = kernels.add_and_norm(residual_NH, None, fused.layers[0].input_norm, fused.eps, adapters)
        norms_after = [*(layer.input_norm for layer in fused.layers[1:]), fused.final_norm]
        for number, (layer, norm_after) in enumerate(zip(fused.layers, norms_after, strict=True)):
            cache = self._store.keys[number], self._store.values[number]
            qkv, y, first = self._project(layer.qkv, x_NH, adapters)
            rotary = fused.cos_PD, fused.sin_PD
            q_NHD = kernels.heads(
                qkv, y, layer.head_norm, rotary, rows.position_N, rows.cache_slot_N, cache, self._shape, fused.eps,
                adapters, first,
            )  # fmt: skip
            seen_NHD = torch.empty_like(q_NHD)
            rows.attend(q_NHD, cache, seen_NHD, fused.scale, layer.window)
            delta = self._project(layer.out, seen_NHD.flatten(1), adapters)
            x_NH = kernels.add_and_norm(residual_NH, delta, layer.mlp_norm, fused.eps, adapters)
            gate_up, y, first = self._project(layer.gate_up, x_NH, adapters)
            delta = self._project(layer.down, kernels.gate(gate_up, y, adapters, first), adapters)
            x_NH = kernels.add_and_norm(residual_NH, delta, norm_after, fused.eps, adapters)
        return x_NH

    def logits(self, hidden_NH: Tensor, slot_of_tile: Tensor, adapted: bool, out_NV: Tensor | None = None) -> Tensor:
        """[N, V] in the model's dtype. `adapted`: some adapter sits on the unembedding."""
        unembedding = self._fused.unembedding
        if out_NV is None:
            out_NV = self._linear(hidden_NH, unembedding)
        elif self._fixed_rows is None and unembedding.bias_O is None:
            torch.mm(hidden_NH, unembedding.weight_OI.T, out=out_NV)
        else:
            out_NV.copy_(self._linear(hidden_NH, unembedding))
        if adapted:
            number = self._slots.first_linear(unembedding)
            adapters = self._adapters(slot_of_tile)
            kernels.add_low_rank(out_NV, kernels.shrink(hidden_NH, adapters, number, 1), adapters, number)
        return out_NV

    def _adapters(self, slot_of_tile: Tensor) -> Adapters:
        return Adapters(self._slots.tables, slot_of_tile, self.steady)

    def _project(self, projection: Projection, x_NI: Tensor, adapters: Adapters) -> tuple[Tensor, Tensor, int]:
        """The base weights' output, the first half of the adapters' product, and the number of the first linear."""
        first = self._slots.first_linear(projection)
        linears = len(projection.paths)
        if not x_NI.is_cuda or not torch.cuda.is_current_stream_capturing():
            return self._linear(x_NI, projection), kernels.shrink(x_NI, adapters, first, linears), first
        # In a graph both run at once: neither fills the card.
        self._side = self._side or torch.cuda.Stream()
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            y = kernels.shrink(x_NI, adapters, first, linears)
        out_NO = self._linear(x_NI, projection)
        main.wait_stream(self._side)
        return out_NO, y, first

    def _linear(self, x_NI: Tensor, projection: Projection) -> Tensor:
        weight, bias, rows = projection.weight_OI, projection.bias_O, len(x_NI)
        if self._fixed_rows is None or rows == self._fixed_rows:
            return F.linear(x_NI, weight, bias)
        pieces = x_NI.new_zeros(-(-rows // self._fixed_rows) * self._fixed_rows, x_NI.shape[1])
        pieces[:rows] = x_NI
        return torch.cat([F.linear(piece, weight, bias) for piece in pieces.split(self._fixed_rows)])[:rows]


def rounded_rows(rows: int) -> int:
    """Up to one of the numbers of rows that passes are recorded for: few, and not much larger."""
    step = TILE if rows <= 64 else 32 if rows <= 128 else 64 if rows <= 512 else 256 if rows <= 2048 else 1024
    return -(-rows // step) * step
