"""Curves made fit for a screen: smoothed, thinned out without losing a spike, joined over seeds. Pure functions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mint.dashboard.data import Series

POINTS = 400
"""Most points of one curve; a chart is some 400 pixels wide."""

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for a two-sided 95 % interval with 1, 2, ... 9 degrees of freedom; beyond, the normal's 1.96 is near."""


def finite(series: Series) -> Series:
    kept = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    return Series([s for s, _ in kept], [v for _, v in kept])


def smoothed(series: Series, weight: float) -> Series:
    """Exponential moving average, its start corrected: y_t = sum_i w^(t-i) x_i / sum_i w^(t-i)."""
    total = norm = 0.0
    values = []
    for value in series.values:
        total, norm = weight * total + value, weight * norm + 1
        values.append(total / norm)
    return Series(series.steps, values)


def thinned(series: Series, points: int = POINTS) -> Series:
    """At most `points` points: first and last, and of every stretch between them the lowest and the highest, so that no
    spike is lost."""
    n = len(series)
    if n <= points:
        return series
    edges = np.linspace(1, n - 1, max((points - 2) // 2, 1) + 1).astype(int)
    values = np.array(series.values)
    chosen = {0, n - 1}
    for start, end in pairwise(edges):
        if end > start:
            chosen |= {start + int(values[start:end].argmin()), start + int(values[start:end].argmax())}
    order = sorted(chosen)
    return Series([series.steps[i] for i in order], [series.values[i] for i in order])


def aligned(several: Sequence[Series], points: int = POINTS) -> list[Series]:
    """All over the same steps, so that they can be stacked: 0 where one of them says nothing, and beyond `points` steps
    means over equal stretches."""
    steps = sorted({step for series in several for step in series.steps})
    stretch = max(math.ceil(len(steps) / points), 1)
    found = []
    for series in several:
        known = dict(zip(series.steps, series.values, strict=True))
        values = [known.get(step, 0.0) for step in steps]
        means = [float(np.mean(values[i : i + stretch])) for i in range(0, len(values), stretch)]
        found.append(Series(steps[::stretch], means))
    return found


def joined(several: Sequence[Series]) -> tuple[Series, list[float]]:
    """Mean over runs at every step that at least two of them have, and the half width of its 95 % interval."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for series in several:
        for step, value in zip(series.steps, series.values, strict=True):
            by_step[step].append(value)
    steps = sorted(step for step, values in by_step.items() if len(values) >= min(2, len(several)))
    means = [float(np.mean(by_step[step])) for step in steps]
    return Series(steps, means), [half_width(by_step[step]) for step in steps]


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of the mean; 0 for a single value, of which nothing is known."""
    n = len(values)
    if n < 2:
        return 0.0
    t = T_95[n - 2] if n - 2 < len(T_95) else 1.96
    return t * float(np.std(values, ddof=1)) / math.sqrt(n)
