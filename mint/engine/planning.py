"""Which datums of a call go into which micro-batch. Tokens in, indices out: it knows nothing of models.

What datums begin with in common is computed, and counts, once in each micro-batch (see `mint.engine.tree`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from mint.engine import tree

# What a micro-batch takes longer on several cores than its cost divided by their number (measured, on two of them).
SHARING = 1.05


@dataclass(frozen=True)
class Cluster:
    """Datums that begin alike."""

    indices: list[int]
    tokens: int
    """What they have in common counts once."""
    pairs: int
    """Of a token and one that it looks at."""


def plan(sequences: Sequence[np.ndarray], token_budget: int) -> list[list[int]]:
    """Groups datums into micro-batches of at most `token_budget` tokens, a longer datum alone; what datums begin with
    in common counts once, and such datums stay together as far as the budget goes. Longest first: memory peaks in the
    first micro-batch rather than in the last, and neighbours of like length waste least in attention."""
    batches: list[list[int]] = []
    room = 0
    for cluster in _clusters(sequences, token_budget):
        if not batches or cluster.tokens > room:
            batches.append([])
            room = token_budget
        batches[-1] += cluster.indices
        room -= cluster.tokens
    return batches


def plan_evenly(sequences: Sequence[np.ndarray], token_budget: int, parts_of: Callable[[int], int]) -> list[list[int]]:
    """As `plan`, but in so many micro-batches of like size as `parts_of` says for the number of tokens: a little beyond
    the budget rather than with a small one at the end."""
    total = _tokens(sequences, token_budget)
    return _evenly(sequences, total, token_budget, parts_of(total), 0.0).batches


def plan_for_cores(
    sequences: Sequence[np.ndarray],
    token_budget: int,
    choices_of: Callable[[int], Collection[int]],
    cores: int,
    pair_cost: float,
) -> list[list[int]]:
    """As `plan_evenly`, where `cores` of them are computed at once: all cost about the same, a token 1 and each that
    it looks at `pair_cost`. Of several choices for so many tokens, the one that is over first: fewer micro-batches than
    cores, which then share them, where one datum is longer than all others, or where each micro-batch would have to
    compute the same prompt again."""
    total = _tokens(sequences, token_budget)
    choices = sorted(choices_of(total), reverse=True)
    plans = [_evenly(sequences, total, token_budget, parts, pair_cost) for parts in choices]
    return min(plans, key=lambda plan: plan.time(cores)).batches


@dataclass(frozen=True)
class _Plan:
    batches: list[list[int]]
    costs: list[float]

    def time(self, cores: int) -> float:
        """Until all are computed, in the unit of their costs."""
        total = 0.0
        for first in range(0, len(self.costs), cores):
            costs = self.costs[first : first + cores]
            each = cores // len(costs)
            total += max(costs) * (SHARING / each if each > 1 else 1.0)
        return total


def _evenly(sequences: Sequence[np.ndarray], total: int, token_budget: int, parts: int, pair_cost: float) -> _Plan:
    batches: list[list[int]] = [[] for _ in range(parts)]
    loads, sizes = [0.0] * parts, [0] * parts

    def cost(cluster: Cluster) -> float:
        return cluster.tokens + pair_cost * cluster.pairs

    # The largest first, each to whoever has least; whoever has few tokens that cost much is not given too many others.
    share = -(-total // parts)
    most = max(token_budget, share)
    for cluster in sorted(_clusters(sequences, share), key=lambda cluster: -cost(cluster)):
        roomy = [n for n in range(parts) if sizes[n] + cluster.tokens <= most] or range(parts)
        lightest = min(roomy, key=lambda n: loads[n])
        batches[lightest] += cluster.indices
        loads[lightest] += cost(cluster)
        sizes[lightest] += cluster.tokens
    taken = [n for n in range(parts) if batches[n]]
    return _Plan([batches[n] for n in taken], [loads[n] for n in taken])


def _tokens(sequences: Sequence[np.ndarray], token_budget: int) -> int:
    return sum(cluster.tokens for cluster in _clusters(sequences, token_budget))


def _clusters(sequences: Sequence[np.ndarray], token_budget: int) -> list[Cluster]:
    """Of at most so many tokens, unless a single datum has more; the longest datum first, in a cluster and of all
    clusters."""
    order = tree.alike(sequences)
    shared = tree.shared_lengths([sequences[i] for i in order])
    found: list[Cluster] = []
    for index, common in zip(order, shared, strict=True):
        length = len(sequences[index])
        common = common if common >= tree.SHORTEST_SHARED else 0
        if found and common and found[-1].tokens + length - common <= token_budget:
            last = found[-1]
            pairs = last.pairs + _pairs(length) - _pairs(common)
            found[-1] = Cluster([*last.indices, index], last.tokens + length - common, pairs)
        else:
            found.append(Cluster([index], length, _pairs(length)))
    for cluster in found:
        cluster.indices.sort(key=lambda i: (-len(sequences[i]), i))
    return sorted(found, key=lambda cluster: -len(sequences[cluster.indices[0]]))


def _pairs(tokens: int) -> int:
    return tokens * (tokens + 1) // 2
