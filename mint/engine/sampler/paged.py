"""Keys and values in blocks, and attention over them: the tensors behind the numbers `cache.py` hands out.

Shapes: T packed tokens of a step, N sequences that read one token, S slots of the longest of their block tables,
H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine import steady
from mint.engine.attention import PackedAttention
from mint.engine.model import BaseModel


class Blocks:
    """For each layer one tensor of keys and one of values, [blocks, *shape] each."""

    def __init__(self, model: BaseModel, block_size: int, key_shape: Sequence[int], value_shape: Sequence[int]) -> None:
        self.block_size = block_size
        empty = partial(torch.empty, dtype=model.dtype, device=model.device)
        self.keys: list[Tensor] = [empty(0, *key_shape)] * model.num_layers
        self.values: list[Tensor] = [empty(0, *value_shape)] * model.num_layers

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def grow(self, blocks: int) -> None:
        """Layer by layer, so that no more than one is in memory twice."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                if len(old) < blocks:
                    tensors[layer] = old.new_zeros(blocks, *old.shape[1:])
                    tensors[layer][: len(old)] = old

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            source, target = torch.tensor(pairs, device=self.keys[0].device).T
            for tensor in (*self.keys, *self.values):
                tensor[target] = tensor[source]

    def clear(self, blocks: Sequence[int]) -> None:
        """A mask adds -inf and multiplies by 0, and neither makes a NaN go away: what another tenant's diverged policy
        left behind in a block must not be there even to be masked."""
        if blocks:
            index = torch.tensor(blocks, device=self.keys[0].device)
            for tensor in (*self.keys, *self.values):
                tensor.index_fill_(0, index, 0.0)


class BlockStore(Blocks):
    """Keys and values both [blocks, block_size, K, D]."""

    def __init__(self, model: BaseModel, block_size: int) -> None:
        shape = (block_size, model.num_kv_heads, model.head_dim)
        super().__init__(model, block_size, shape, shape)
        self.row_multiple = steady.row_multiple(model.device, model.dtype)

    @property
    def bytes_a_token(self) -> int:
        """Of its keys and values in all layers."""
        return sum(tensor.element_size() * tensor.shape[2:].numel() for tensor in (*self.keys, *self.values))

    def blocks_for(self, tokens: int) -> int:
        """Blocks attention over this many tokens reads, those of its padding included."""
        return -(-(tokens if self.row_multiple == 1 else steady.key_slots(tokens)) // self.block_size)

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Slot s is place s % block_size of block s // block_size."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots_T, k_TKD)
        self.values[layer].flatten(0, 1).index_copy_(0, slots_T, v_TKD)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks, in their order: [len(blocks) * block_size, K, D]."""
        return tuple(x[layer].index_select(0, blocks).flatten(0, 1) for x in (self.keys, self.values))  # type: ignore[return-value]


@dataclass(frozen=True)
class Decodes:
    """The sequences that read a single token, with everything before it in the cache."""

    index_N: Tensor | None
    """Their places among the packed tokens; None: they are all there is."""
    table_NM: Tensor
    """Block tables, filled up with any block where a sequence has fewer."""
    lengths_N: Tensor
    """Tokens to look at, the one just read included."""
    read: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Gives the keys and values of a layer, [N, S, K, D], from this step's; None: they are gathered by the tables."""


@dataclass(frozen=True)
class Span:
    """A piece of a prompt, tokens start..stop-1 of the packed row, behind `context` tokens already in the cache."""

    start: int
    stop: int
    context: int
    blocks: Tensor


@dataclass(frozen=True)
class Fresh:
    """Prompts, or their first pieces, that need nothing from the cache."""

    index: Tensor | None
    """Their places among the packed tokens; None: they are all there is."""
    lengths: list[int]


class PagedAttention:
    """The attention of one step: writes the new keys and values, then lets each sequence look at its own."""

    def __init__(
        self, store: BlockStore, slots_T: Tensor, decodes: Decodes | None, fresh: Fresh | None, spans: Sequence[Span]
    ) -> None:
        self._store = store
        self._slots_T = slots_T
        self._decodes = decodes
        self._fresh = fresh
        self._packed = PackedAttention(fresh.lengths, slots_T.device, store.row_multiple > 1) if fresh else None
        self._spans = spans
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # (span, or -1 for the decodes; window)

    def __call__(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        self._store.write(layer, self._slots_T, k_TKD, v_TKD)
        decodes, fresh = self._decodes, self._fresh
        if decodes and decodes.index_N is None:
            return self._decode(decodes, layer, q_THD, k_TKD, v_TKD, scale, window)
        if fresh and self._packed and fresh.index is None:
            return self._packed(layer, q_THD, k_TKD, v_TKD, scale, window)
        out_THD = torch.empty_like(q_THD)
        if decodes:
            q, k, v = (x[decodes.index_N] for x in (q_THD, k_TKD, v_TKD))
            out_THD[decodes.index_N] = self._decode(decodes, layer, q, k, v, scale, window)
        if fresh and self._packed:
            q, k, v = (x[fresh.index] for x in (q_THD, k_TKD, v_TKD))
            out_THD[fresh.index] = self._packed(layer, q, k, v, scale, window)
        for number, span in enumerate(self._spans):
            tokens = slice(span.start, span.stop)
            out_THD[tokens] = self._continue(number, layer, q_THD[tokens], scale, window)
        return out_THD

    def _decode(
        self,
        decodes: Decodes,
        layer: int,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        slots = decodes.table_NM.shape[1] * self._store.block_size
        if decodes.read is None:
            k, v = self._store.read(layer, decodes.table_NM.flatten())
            k_NSKD, v_NSKD = (x.unflatten(0, (len(q_NHD), -1)) for x in (k, v))
        else:
            k_NSKD, v_NSKD = (x[:, :slots] for x in decodes.read(layer, k_NKD, v_NKD))
        k_NKSD, v_NKSD = k_NSKD.transpose(1, 2), v_NSKD.transpose(1, 2)
        # The queries that share a key head stand where other tokens of the sequence would: all see the same.
        q_NKGD = q_NHD.unflatten(1, (k_NKSD.shape[1], -1))
        group = q_NKGD.shape[2]
        q_NKGD = steady.pad_rows(q_NKGD, self._store.row_multiple, dim=2)
        mask = self._decode_mask(decodes, window, q_NHD.dtype)
        out_NKGD = F.scaled_dot_product_attention(q_NKGD, k_NKSD, v_NKSD, attn_mask=mask, scale=scale)
        return out_NKGD[:, :, :group].flatten(1, 2)

    def _decode_mask(self, decodes: Decodes, window: int | None, dtype: torch.dtype) -> Tensor:
        if (-1, window) not in self._masks:
            slots = decodes.table_NM.shape[1] * self._store.block_size
            here_S = torch.arange(slots, device=decodes.lengths_N.device)
            hidden_NS = here_S >= decodes.lengths_N[:, None]
            if window is not None:
                hidden_NS |= here_S < (decodes.lengths_N - window)[:, None]
            mask_NS = torch.zeros(hidden_NS.shape, dtype=dtype, device=hidden_NS.device)
            self._masks[-1, window] = mask_NS.masked_fill_(hidden_NS, -torch.inf)[:, None, None, :]
        return self._masks[-1, window]

    def _continue(self, number: int, layer: int, q_LHD: Tensor, scale: float, window: int | None) -> Tensor:
        span = self._spans[number]
        k_SKD, v_SKD = self._store.read(layer, span.blocks)
        q_RHD = steady.pad_rows(q_LHD, self._store.row_multiple)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_RHD, k_SKD, v_SKD))
        mask = self._span_mask(number, window, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0, :, : len(q_LHD)].transpose(0, 1)

    def _span_mask(self, number: int, window: int | None, device: torch.device) -> Tensor:
        if (number, window) not in self._masks:
            span = self._spans[number]
            count = span.stop - span.start
            # The padding of the queries sees what tokens there would see: rows of a mask must not be empty.
            rows = -(-count // self._store.row_multiple) * self._store.row_multiple
            slots = len(span.blocks) * self._store.block_size
            here = torch.arange(span.context, span.context + rows, device=device)
            distance = here[:, None] - torch.arange(slots, device=device)
            seen = distance >= 0
            self._masks[number, window] = seen if window is None else seen & (distance < window)
        return self._masks[number, window]
