"""Sequences that begin alike, as a tree: what several of them begin with is there, and is computed, once.

A node is a run of tokens with everything above it before it; a sequence is a path from a root. Knows nothing of models:
tokens in, integers out. What attention makes of a tree lives in `mint.engine.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

# A shared beginning shorter than this is computed by each: a node of its own would cost attention more than it saves.
SHORTEST_SHARED = 16


@dataclass(frozen=True)
class Tree:
    """Nodes laid end to end in packed rows, each behind its parent; roots first, unless it is several (`beside`)."""

    lengths: list[int]
    parents: list[int]
    """The index of the node before, or -1."""
    depths: list[int]
    """How many tokens stand before a node."""
    rows: list[np.ndarray]
    """For each sequence, the packed row of each of its tokens."""

    @property
    def size(self) -> int:
        return sum(self.lengths)

    @property
    def roots(self) -> int:
        return sum(parent < 0 for parent in self.parents)

    def positions(self) -> np.ndarray:
        return np.concatenate([np.arange(d, d + n) for d, n in zip(self.depths, self.lengths, strict=True)])

    def keys(self) -> list[np.ndarray]:
        """For each node the packed rows it looks at: those above it, then its own."""
        found: list[np.ndarray] = []
        start = 0
        for parent, length in zip(self.parents, self.lengths, strict=True):
            own = np.arange(start, start + length)
            found.append(own if parent < 0 else np.concatenate([found[parent], own]))
            start += length
        return found


def shared_lengths(sequences: Sequence[np.ndarray]) -> list[int]:
    """How many tokens each sequence has in common, from its first, with the one before it; 0 for the first."""
    found = [0] * min(1, len(sequences))
    for before, here in pairwise(sequences):
        most = min(len(before), len(here))
        if not most or before[0] != here[0]:  # as most are, and it need not be asked of all tokens
            found.append(0)
            continue
        different = before[:most] != here[:most]
        found.append(int(different.argmax()) if different.any() else most)
    return found


def alike(sequences: Sequence[np.ndarray]) -> list[int]:
    """Indices in an order in which sequences that begin alike are neighbours."""
    return sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())


def grow(sequences: Sequence[np.ndarray]) -> Tree:
    order = alike(sequences)
    shared = shared_lengths([sequences[i] for i in order])
    nodes: list[tuple[int, int, int]] = []  # parent, depth, end
    ends: dict[int, int] = {}  # sequence -> the node it ends in
    # Ranges of `order` whose members have their first `depth` tokens in common, which `parent` ends with.
    ranges = [(low, high, 0, -1) for low, high in _runs(shared, 0, len(order), SHORTEST_SHARED)]
    while ranges:
        low, high, depth, parent = ranges.pop()
        first = len(sequences[order[low]])
        end = first if high - low == 1 else min(first, *shared[low + 1 : high])
        if end > depth:
            nodes.append((parent, depth, end))
            parent = len(nodes) - 1
        if high - low == 1:
            ends[order[low]] = parent
        else:
            ranges += [(a, b, end, parent) for a, b in _runs(shared, low, high, end + SHORTEST_SHARED)]
    return _lay_out(sequences, nodes, ends)


def beside(trees: Sequence[Tree]) -> Tree:
    """All of them as one, each one's nodes behind the last one's, nothing in common: roots then do not come first."""
    if len(trees) == 1:
        return trees[0]
    nodes = [0, *accumulate(len(tree.lengths) for tree in trees)]
    starts = [0, *accumulate(tree.size for tree in trees)]
    return Tree(
        lengths=[length for tree in trees for length in tree.lengths],
        parents=[p if p < 0 else p + node for tree, node in zip(trees, nodes, strict=False) for p in tree.parents],
        depths=[depth for tree in trees for depth in tree.depths],
        rows=[rows + start for tree, start in zip(trees, starts, strict=False) for rows in tree.rows],
    )


def _runs(shared: Sequence[int], low: int, high: int, least: int) -> list[tuple[int, int]]:
    """The range cut wherever neighbours share fewer than `least` tokens."""
    cuts = [low, *(i for i in range(low + 1, high) if shared[i] < least), high]
    return list(pairwise(cuts))


def _lay_out(sequences: Sequence[np.ndarray], nodes: list[tuple[int, int, int]], ends: dict[int, int]) -> Tree:
    """Roots first, and long before short, as far as parents stand before children."""
    order = sorted(range(len(nodes)), key=lambda i: (nodes[i][1], nodes[i][1] - nodes[i][2]))
    place = {node: n for n, node in enumerate(order)} | {-1: -1}
    tree = Tree(
        lengths=[nodes[i][2] - nodes[i][1] for i in order],
        parents=[place[nodes[i][0]] for i in order],
        depths=[nodes[i][1] for i in order],
        rows=[],
    )
    keys = tree.keys()
    tree.rows.extend(keys[place[ends[i]]] for i in range(len(sequences)))
    return tree
