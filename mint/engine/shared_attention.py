"""Attention of a `Tree` of packed tokens, for training: each node looks at what stands above it and at itself.

On the CPU nodes are laid out in buckets, as `PackedAttention` does it. On a GPU in half precision it is flash attention
over the rows as they are: `FlashLayout` says where nodes begin, and is a plain tuple of tensors because the layers that
use it are compiled.

Shapes: T packed tokens, S the rows all nodes look at, one node after the other, H query heads, K key/value heads,
D head size, B nodes of a bucket, P tokens above each, L the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.attention import PackedAttention, of_like_length
from mint.engine.tree import Tree

MANY = 8192
# Of our own kernels, whose tiles would not fit on every GPU beyond; torch's flash attention takes them.
WIDEST_HEAD = 128


class TreeAttention:
    """An `Attend`. Roots, which come first, are packed sequences; every other bucket holds nodes of one depth."""

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self._device = device
        self._roots = PackedAttention(tree.lengths[: tree.roots], device)
        self._root_rows = sum(tree.lengths[: tree.roots])
        self._buckets = [_Bucket(tree, nodes, device) for nodes in _of_like_shape(tree)]
        if self._buckets:
            order = np.concatenate([np.arange(self._root_rows), *(bucket.rows for bucket in self._buckets)])
            self._return = torch.from_numpy(np.argsort(order)).to(device)

    def __call__(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        count = self._root_rows
        out = self._roots(layer, q_THD[:count], k_TKD[:count], v_TKD[:count], scale, window)
        if not self._buckets:
            return out
        parts = [bucket(q_THD, k_TKD, v_TKD, scale, window) for bucket in self._buckets]
        return torch.cat([out, *parts]).index_select(0, self._return)


class _Bucket:
    """Nodes with equally many tokens above them, right-padded to the longest: padding is never read."""

    def __init__(self, tree: Tree, nodes: list[int], device: torch.device) -> None:
        keys, above = tree.keys(), tree.depths[nodes[0]]
        self._above, self._longest = above, max(tree.lengths[node] for node in nodes)
        self._count = len(nodes)
        padded, kept = [], []
        for n, node in enumerate(nodes):
            seen = keys[node]
            padded.append(np.pad(seen, (0, above + self._longest - len(seen)), mode="edge"))
            kept.append(np.arange(n * self._longest, n * self._longest + tree.lengths[node]))
        keys_BS = np.stack(padded)
        self._keys = torch.from_numpy(keys_BS.reshape(-1)).to(device)
        self._queries = torch.from_numpy(keys_BS[:, above:].reshape(-1)).to(device)
        self._kept = torch.from_numpy(np.concatenate(kept)).to(device)
        self.rows = np.concatenate([keys[node][above:] for node in nodes])
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None) -> Tensor:
        q_BHLD = q_THD.index_select(0, self._queries).unflatten(0, (self._count, -1)).transpose(1, 2)
        k_BKSD, v_BKSD = (
            x.index_select(0, self._keys).unflatten(0, (self._count, -1)).transpose(1, 2) for x in (k_TKD, v_TKD)
        )
        mask = self._mask(window, q_THD.device)
        out_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BKSD, v_BKSD, attn_mask=mask, scale=scale, enable_gqa=True)
        return out_BHLD.transpose(1, 2).flatten(0, 1).index_select(0, self._kept)

    def _mask(self, window: int | None, device: torch.device) -> Tensor:
        if window not in self._masks:
            here = torch.arange(self._above, self._above + self._longest, device=device)
            distance = here[:, None] - torch.arange(self._above + self._longest, device=device)[None, :]
            self._masks[window] = (distance >= 0) & (distance < (window or len(distance[0])))
        return self._masks[window]


def _of_like_shape(tree: Tree) -> list[list[int]]:
    """The nodes that are no roots, by depth and then by length."""
    found: list[list[int]] = []
    below = range(tree.roots, len(tree.lengths))
    for depth in sorted({tree.depths[node] for node in below}):
        level = sorted((n for n in below if tree.depths[n] == depth), key=lambda n: -tree.lengths[n])
        found += of_like_length(level, tree.lengths)
    return found


class FlashLayout(NamedTuple):
    """Where the nodes' queries and keys begin and end, in sizes rounded up (see `rounded`). What fills the difference
    are nodes of their own, at the end, that nobody looks at; some of them are empty."""

    query_starts: Tensor
    key_starts: Tensor
    keys_S: Tensor | None
    """Packed rows that all nodes look at; None: each its own, in order."""
    even: Tensor | None
    """Where all nodes are roots of one length, [B, L], and nothing in it: a GPU has a faster kernel for that."""
    query_span: Tensor
    """Empty, as long as the longest node: a number the compiler takes for a changing size, not for a constant."""
    key_span: Tensor

    def tensors(self) -> list[Tensor]:
        """Those with something in them."""
        return [self.query_starts, self.key_starts, *([] if self.keys_S is None else [self.keys_S])]

    def spans(self) -> tuple[torch.Size, ...]:
        return tuple(span.shape for span in (self.query_span, self.key_span, self.even) if span is not None)

    def with_tensors(self, tensors: Sequence[Tensor]) -> FlashLayout:
        """With others of the same shapes, in the order of `tensors()`; the empty ones go to their device."""
        query_starts, key_starts, *rest = tensors
        device = query_starts.device
        return FlashLayout(
            query_starts=query_starts,
            key_starts=key_starts,
            keys_S=rest[0] if rest else None,
            even=None if self.even is None else self.even.to(device),
            query_span=self.query_span.to(device),
            key_span=self.key_span.to(device),
        )


def rounded(count: int, step: int = 1) -> int:
    """Up to a multiple of `step` and to one of eight sizes an octave: few sizes, and at most an eighth more. Sixteen an
    octave from `MANY` on, where filling costs more than recording another size."""
    step = max(step, (1 << (count - 1).bit_length()) // (16 if count <= MANY else 32))
    return -(-count // step) * step


def power_of_two(count: int) -> int:
    """Up to the next: for sizes that cost next to nothing."""
    return 1 << (count - 1).bit_length()


def flash_layout(tree: Tree) -> tuple[FlashLayout, int]:
    """On the CPU; and how many rows there are with the filling."""
    keys = tree.keys()
    seen = [len(rows) for rows in keys]
    shared = tree.roots < len(tree.lengths)
    # Of one sequence, or of one token each, the compiler would make a function of its own.
    if not shared and len(set(seen)) == 1 and len(seen) > 1 and seen[0] > 1:
        count, length = rounded(len(seen)), seen[0]
        starts, span = _starts([length] * count), _span(length)
        even = torch.empty(count, length, dtype=torch.uint8)
        return FlashLayout(starts, starts.clone(), None, even, span, span), count * length
    # Keys that are gathered need somebody to look at them, or their gradient would be whatever was in memory.
    rows = rounded(tree.size + int(shared), 16)
    longest = power_of_two(max(tree.lengths))
    filling = _pieces(rows - tree.size, longest)
    filling_seen, keys_S = filling.copy(), None
    if shared:
        total = sum(seen) + sum(filling)
        filling_seen[0] += rounded(total, 16) - total
        keys_S = torch.from_numpy(np.concatenate([*keys, np.full(sum(filling_seen), rows - 1)]))
    empty = [0] * (power_of_two(len(seen) + len(filling)) - len(seen) - len(filling))
    key_lengths = [*seen, *filling_seen, *empty]
    layout = FlashLayout(
        query_starts=_starts([*tree.lengths, *filling, *empty]),
        key_starts=_starts(key_lengths),
        keys_S=keys_S,
        even=None,
        query_span=_span(longest),
        key_span=_span(power_of_two(max(key_lengths))),
    )
    return layout, rows


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)


def _span(length: int) -> Tensor:
    return torch.empty(max(2, length), dtype=torch.uint8)


def _pieces(count: int, longest: int) -> list[int]:
    """The count in parts of at most `longest`."""
    return [min(longest, count - start) for start in range(0, count, longest)]


def flash_attention(
    layout: FlashLayout, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
) -> Tensor:
    if layout.even is not None and window is None:
        q_BHLD, k_BKLD, v_BKLD = (x.unflatten(0, layout.even.shape).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        out_BHLD = F.scaled_dot_product_attention(q_BHLD, k_BKLD, v_BKLD, is_causal=True, scale=scale, enable_gqa=True)
        return out_BHLD.transpose(1, 2).flatten(0, 1)
    if layout.keys_S is not None:
        k_TKD, v_TKD = k_TKD.index_select(0, layout.keys_S), v_TKD.index_select(0, layout.keys_S)
    if q_THD.shape[2] > WIDEST_HEAD:
        # Causal with more keys than queries: it lines up their ends, which is what a node needs.
        return torch.ops.aten._flash_attention_forward(
            q_THD,
            k_TKD,
            v_TKD,
            layout.query_starts,
            layout.key_starts,
            layout.query_span.shape[0],
            layout.key_span.shape[0],
            0.0,
            True,
            False,
            scale=scale,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )[0]
    return torch.ops.mint.node_attention(
        q_THD,
        k_TKD,
        v_TKD,
        layout.query_starts,
        layout.key_starts,
        layout.query_span.shape[0],
        layout.key_span.shape[0],
        scale,
        window or 0,
    )[0]
