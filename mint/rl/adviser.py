"""How large groups and batches should be, from pass rates.

A group of n members on a problem with pass rate p has signal if they do not all fail and do not all pass:

    chance = 1 - p ** n - (1 - p) ** n

Measured rates are themselves noisy: a problem seen four times that passed never may have p = 0.2. So the spread of the
true rates is what is left of the measured variance after that of the draws is taken out, and the chance is averaged
over a Beta distribution with this mean and spread. Rewards are taken to be right or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mint.errors import BadRequest

SIZES = (2, 4, 8, 16, 32)
ENOUGH = 0.6
"""Share of groups with signal from which on larger groups pay less than more groups."""
GROUPS_WITH_SIGNAL = 8
"""Wanted in a step: an average over fewer problems mostly says which problems they were."""
UNKNOWN_SPREAD = 0.3
"""Of the largest spread there can be, where each problem was seen once and nothing says how far they differ."""


@dataclass(frozen=True)
class Advice:
    mean_rate: float
    spread: float
    """Standard deviation of the true pass rates."""
    chances: dict[int, float]
    """Expected share of groups with signal, by group size."""
    group_size: int
    groups_per_batch: int

    def __str__(self) -> str:
        table = ", ".join(f"{size}: {chance:.0%}" for size, chance in self.chances.items())
        reached = self.chances[self.group_size]
        return (
            f"Pass rate {self.mean_rate:.0%} (problems differ by {self.spread:.0%}). Groups with signal, by group "
            f"size: {table}. Advised: groups of {self.group_size}, {self.groups_per_batch} of them a step, so that "
            f"about {reached * self.groups_per_batch:.0f} have signal."
            + ("" if reached >= ENOUGH else " Most problems are out of reach or solved: change the problems first.")
        )


def chance_of_signal(rate: float, size: int) -> float:
    """For one problem whose pass rate is known."""
    if not 0 <= rate <= 1 or size < 1:
        raise BadRequest(f"a pass rate of {rate} and groups of {size}: rates are in 0..1 and groups have a member.")
    return 1 - rate**size - (1 - rate) ** size


def expected_chance(mean: float, spread: float, size: int) -> float:
    """Over problems whose rates follow a Beta distribution with this mean and standard deviation."""
    most = math.sqrt(mean * (1 - mean))
    if most == 0 or spread >= most:
        return 0.0  # every problem always passes or always fails
    if spread < 1e-6:
        return chance_of_signal(mean, size)
    strength = (most / spread) ** 2 - 1
    passing, failing = mean * strength, (1 - mean) * strength

    def all_alike(a: float) -> float:
        return math.prod((a + i) / (strength + i) for i in range(size))

    return 1 - all_alike(passing) - all_alike(failing)


def advise(rates: Sequence[float], rollouts: Sequence[int] | int) -> Advice:
    """From the measured pass rate of each problem and the number of rollouts it was measured with."""
    if not len(rates):
        raise BadRequest("there are no measured pass rates to go by.")
    counts = np.broadcast_to(np.asarray(rollouts, dtype=np.float64), (len(rates),))
    mean = float(np.average(np.clip(rates, 0, 1), weights=counts))
    spread = _spread(np.clip(np.asarray(rates, dtype=np.float64), 0, 1), counts, mean)
    chances = {size: expected_chance(mean, spread, size) for size in SIZES}
    size = next((size for size in SIZES if chances[size] >= ENOUGH), SIZES[-1])
    groups = math.ceil(GROUPS_WITH_SIGNAL / max(chances[size], 0.05))
    return Advice(mean, spread, chances, size, groups)


def _spread(rates: np.ndarray, counts: np.ndarray, mean: float) -> float:
    """Standard deviation of the true rates: E[(measured - mean)^2] = var + (m(1-m) - var) * E[1/n]."""
    largest = mean * (1 - mean)
    per_rollout = float(np.mean(1 / counts))
    if per_rollout > 0.99 or len(rates) < 2:
        return UNKNOWN_SPREAD * math.sqrt(largest)
    variance = (float(np.mean((rates - mean) ** 2)) - largest * per_rollout) / (1 - per_rollout)
    return math.sqrt(min(max(variance, 0.0), largest))
