"""The layers of a `FusedDecoder` in kernels: what `FusedDecoder.hidden` computes, for rows in tiles of one adapter.

Shapes: N rows (whole tiles), H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.fused import GELU, FusedDecoder, Projection
from mint.engine.kernels import products
from mint.engine.kernels import rows as kernels
from mint.engine.kernels.draw import LowRank
from mint.engine.kernels.low_rank import TILE, Adapters, add_low_rank, shrink, widened
from mint.engine.kernels.rows import Product
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
    joined: int | None
    """The rank for which there is room at the weights; None: the rows have several adapters."""
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
        project = partial(self._project, adapters=adapters, joined=rows.joined)
        residual_NH = fused.embed(rows.token_N)
        norm = partial(kernels.add_and_norm, residual_NH, eps=fused.eps, adapters=adapters, wide=fused.wide_norms)
        x_NH = norm(None, fused.layers[0].input_norm)
        norms_after = [*(layer.input_norm for layer in fused.layers[1:]), fused.final_norm]
        for number, (layer, norm_after) in enumerate(zip(fused.layers, norms_after, strict=True)):
            cache = self._store.keys[number], self._store.values[number]
            q_NHD = kernels.heads(
                project(layer.qkv, x_NH), layer.head_norm, layer.rotary, rows.position_N, rows.cache_slot_N, cache,
                self._shape, fused.eps, adapters, fused.wide_norms,
            )  # fmt: skip
            seen_NHD = torch.empty_like(q_NHD)
            rows.attend(q_NHD, cache, seen_NHD, fused.scale, layer.window)
            delta = project(layer.out, seen_NHD.flatten(1))
            x_NH = norm(delta, layer.mlp_norm, delta_weight_H=layer.attention_norm)
            delta = project(layer.down, kernels.gate(project(layer.gate_up, x_NH), adapters, fused.act == GELU))
            x_NH = norm(delta, norm_after, delta_weight_H=layer.gated_norm)
        return x_NH

    def unembed(
        self, hidden_NH: Tensor, slot_of_tile: Tensor, adapted: bool, joined: int | None, buffer: Tensor | None = None
    ) -> tuple[Tensor, LowRank | None]:
        """Logits [N, V] in the model's dtype, in the buffer if one is given, and what has to be added to them yet.
        `adapted`: some adapter sits on the unembedding."""
        unembedding, adapters = self._fused.unembedding, self._adapters(slot_of_tile)
        number = self._slots.first_linear(unembedding)
        if adapted and joined is not None:
            assert unembedding.wide_OX is not None
            wide_NX = widened(hidden_NH, adapters, number, joined)
            weight_OX = unembedding.wide_OX[:, : wide_NX.shape[1]]
            return self._linear(wide_NX, weight_OX, unembedding.bias_O, buffer), None
        logits_NV = self._linear(hidden_NH, unembedding.weight_OI, unembedding.bias_O, buffer)
        return logits_NV, LowRank(shrink(hidden_NH, adapters, number, 1), adapters, number) if adapted else None

    def logits(
        self, hidden_NH: Tensor, slot_of_tile: Tensor, adapted: bool, joined: int | None, buffer: Tensor | None = None
    ) -> Tensor:
        """Whole, with what adapters add."""
        logits_NV, low_rank = self.unembed(hidden_NH, slot_of_tile, adapted, joined, buffer)
        if low_rank is not None:
            add_low_rank(logits_NV, low_rank.y, low_rank.adapters, low_rank.linear)
        return logits_NV

    def _adapters(self, slot_of_tile: Tensor) -> Adapters:
        return Adapters(self._slots.tables, slot_of_tile, self._fused.embedding.dtype, self.steady)

    def _project(self, projection: Projection, x_NI: Tensor, adapters: Adapters, joined: int | None) -> Product:
        """The base weights' output and the first half of the adapters' product."""
        first, linears = self._slots.first_linear(projection), len(projection.paths)
        if joined is not None:
            outputs = len(projection.weight_OI)
            weight, bias = _with_room(projection, joined)
            few = len(x_NI) <= products.MOST_ROWS and bias is None and x_NI.dtype.itemsize == 2
            whole = products.few_rows(x_NI, weight) if few else F.linear(x_NI, weight, bias)[None]
            return Product(whole[..., :outputs], whole[..., outputs:].unflatten(2, (linears, joined)), first)
        if not x_NI.is_cuda or not torch.cuda.is_current_stream_capturing():
            y = shrink(x_NI, adapters, first, linears)
            return Product(self._linear(x_NI, projection.weight_OI, projection.bias_O)[None], y, first)
        # In a graph both run at once: neither fills the card.
        self._side = self._side or torch.cuda.Stream()
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            y = shrink(x_NI, adapters, first, linears)
        out_NO = self._linear(x_NI, projection.weight_OI, projection.bias_O)
        main.wait_stream(self._side)
        return Product(out_NO[None], y, first)

    def _linear(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, buffer: Tensor | None = None) -> Tensor:
        """In the buffer, if one is given."""
        rows = len(x_NI)
        if self._fixed_rows is None or rows == self._fixed_rows:
            if buffer is not None and bias_O is None:
                return torch.mm(x_NI, weight_OI.T, out=_of_shape(buffer, rows, len(weight_OI)))
            out_NO = F.linear(x_NI, weight_OI, bias_O)
        else:
            pieces = x_NI.new_zeros(-(-rows // self._fixed_rows) * self._fixed_rows, x_NI.shape[1])
            pieces[:rows] = x_NI
            out_NO = torch.cat([F.linear(piece, weight_OI, bias_O) for piece in pieces.split(self._fixed_rows)])[:rows]
        return out_NO if buffer is None else _of_shape(buffer, *out_NO.shape).copy_(out_NO)


def _with_room(projection: Projection, rank: int) -> tuple[Tensor, Tensor | None]:
    """Weights and bias with the rows for a rank below each of its linears."""
    assert projection.roomy_OI is not None
    rows = len(projection.weight_OI) + rank * len(projection.paths)
    bias_O = projection.roomy_bias_O
    return projection.roomy_OI[:rows], None if bias_O is None else bias_O[:rows]


def _of_shape(buffer: Tensor, rows: int, columns: int) -> Tensor:
    return buffer[: rows * columns].view(rows, columns)


def rounded_rows(rows: int) -> int:
    """Up to one of the numbers of rows that passes are recorded for: few, and not much larger."""
    step = TILE if rows <= 64 else 32 if rows <= 128 else 64 if rows <= 512 else 256 if rows <= 2048 else 1024
    return -(-rows // step) * step
