"""Attention of packed rows of tokens: the border between transformers' modules and whoever supplies K and V.

Here live the `Attend` protocol, the function transformers calls instead of its own attention, and `PackedAttention`,
the causal attention of training and scoring. Attention over a KV cache belongs to the sampler.

Shapes: T packed tokens, H query heads, K key/value heads, D head size, B sequences of a bucket, L its longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from mint.engine import steady
from mint.errors import BadRequest

# The name under which transformers finds `_attention`. No mask function is registered under it, and transformers
# builds no mask for an attention that has none.
IMPLEMENTATION = "mint_packed"

# A bucket takes sequences down to this share of its longest: at most a third of its slots are padding, and sequences
# of similar length need few buckets.
BUCKET_FILL = 2 / 3


class Attend(Protocol):
    """What a caller supplies for one forward pass: who may look at whom, and where keys and values live."""

    def __call__(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """The attention output [T, H, D] of the packed tokens, whose rotary embedding is already applied. With a
        window a token sees itself and the `window - 1` tokens before it."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    family = type(module).__name__
    for name in ("softcap", "s_aux", "position_bias"):
        if extras.get(name) is not None:
            raise BadRequest(f"{family} uses {name} in its attention, which this engine does not have.")
    if attend is None or attention_mask is not None or not getattr(module, "is_causal", True):
        raise BadRequest(f"{family} is not plain causal attention called through transformers' attention interface.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = attend(module.layer_idx, q_THD, k_TKD, v_TKD, scale, sliding_window)  # type: ignore[arg-type]
    return out_THD[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)


class PackedAttention:
    """Causal attention inside each of the packed sequences.

    Sequences are laid out right-padded in buckets of similar length, for attention alone. With padding on the right,
    causality keeps every real token from seeing it, so no mask is needed; what padded slots compute is never read.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | None = None, steadily: bool = False) -> None:
        """`steadily`: what a sequence computes must not depend on its neighbours (see `steady`)."""
        self._steadily = steadily
        width = steady.key_slots if steadily else int
        self._shapes: list[tuple[int, int]]
        self._gather: Tensor | None = None  # slot of a bucket -> packed token; None: the packed row is the bucket
        self._return: Tensor | None = None  # packed token -> slot
        self._masks: dict[tuple[int, int], Tensor] = {}
        if len(set(lengths)) == 1 and width(lengths[0]) == lengths[0]:
            self._shapes = [(len(lengths), lengths[0])]
            return
        starts = [0, *accumulate(lengths)][:-1]
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        buckets = of_like_length(order, lengths)
        self._shapes = [(len(bucket), width(lengths[bucket[0]])) for bucket in buckets]
        gather, back = [], torch.empty(sum(lengths), dtype=torch.long)
        slots = 0
        for bucket, (_, longest) in zip(buckets, self._shapes, strict=True):
            for i in bucket:
                tokens = torch.arange(longest).clamp(max=lengths[i] - 1) + starts[i]
                gather.append(tokens)
                back[starts[i] : starts[i] + lengths[i]] = torch.arange(slots, slots + lengths[i])
                slots += longest
        self._gather, self._return = torch.cat(gather).to(device), back.to(device)

    def __call__(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        if self._gather is None or self._return is None:
            return self._bucket(self._shapes[0], q_THD, k_TKD, v_TKD, scale, window)
        slots = [x.index_select(0, self._gather) for x in (q_THD, k_TKD, v_TKD)]
        sizes = [count * longest for count, longest in self._shapes]
        parts = zip(self._shapes, *(x.split(sizes) for x in slots), strict=True)
        out = [self._bucket(shape, q, k, v, scale, window) for shape, q, k, v in parts]
        return torch.cat(out).index_select(0, self._return)

    def _bucket(
        self, shape: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        length = shape[1]
        q_BHLD, k_BKLD, v_BKLD = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
        mask = None
        if self._steadily or (window is not None and window < length):
            # Told that it is causal, attention would choose the widths itself.
            mask = self._mask(length, length if window is None else window, q.device)
        out_BHLD = F.scaled_dot_product_attention(
            q_BHLD, k_BKLD, v_BKLD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out_BHLD.transpose(1, 2).flatten(0, 1)

    def _mask(self, length: int, window: int, device: torch.device) -> Tensor:
        if (length, window) not in self._masks:
            here = torch.arange(length, device=device)
            distance = here[:, None] - here[None, :]
            self._masks[length, window] = (distance >= 0) & (distance < window)
        return self._masks[length, window]


def of_like_length(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Groups indices, given from the longest down, so that none is shorter than BUCKET_FILL of its group's longest."""
    buckets: list[list[int]] = []
    for i in order:
        if not buckets or lengths[i] < BUCKET_FILL * lengths[buckets[-1][0]]:
            buckets.append([])
        buckets[-1].append(i)
    return buckets
