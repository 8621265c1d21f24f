"""Curves as SVG: lines, an axis with round numbers, marks for alarms and checkpoints, figures on hover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from mint.rl.plots import PANELS, curve
from mint.rl.rundir import Json

WIDTH, HEIGHT = 520.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 10.0, 10.0, 24.0
MOST_POINTS = 240
"""Of a curve; more are averaged in equal stretches, which a screen could not tell apart anyway."""

FURTHER_PANELS: list[tuple[str, tuple[str, ...]]] = [
    ("problems", ("ledger/solved", "ledger/learning", "ledger/dead")),
    ("temperature", ("sampling/temperature",)),
    ("sampler and trainer, largest gap", ("optim/kl_sample_train_max",)),
]
NAMES = {
    "env/all/reward/total": "train",
    "test/env/all/reward/total": "holdout",
    "env/all/by_group/frac_mixed": "mixed",
    "env/all/by_group/frac_all_good": "all right",
    "env/all/by_group/frac_all_bad": "all wrong",
    "kl_policy_base": "to the base model",
    "optim/kl_sample_train_v1": "sampler to trainer",
    "kl_pre_post_v1": "before to after the update",
}
"""Shorter than the metric's name, where the panel says the rest."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    step: int
    kind: str
    """A CSS class: alarm, warning or checkpoint."""
    text: str


def charts(lines: Sequence[Json], marks: Sequence[Mark]) -> str:
    """A figure for every panel that the run has something for."""
    figures = []
    for title, metrics in [*PANELS, *FURTHER_PANELS]:
        series = {metric: _thinned(_finite(lines, metric)) for metric in metrics}
        series = {metric: points for metric, points in series.items() if points}
        if series:
            figures.append(figure(title, series, marks))
    return f'<div class="charts">{"".join(figures)}</div>'


def figure(title: str, series: Mapping[str, Points], marks: Sequence[Mark]) -> str:
    names = [NAMES.get(metric, metric.rpartition("/")[2].replace("_", " ")) for metric in series]
    legend = "".join(f'<span class="key c{n}">{escape(name)}</span>' for n, name in enumerate(names))
    return (
        f'<figure><figcaption>{escape(title)}<span class="legend">{legend}</span></figcaption>'
        f"{_svg(title, list(series.values()), names, marks)}</figure>"
    )


def _svg(title: str, series: Sequence[Points], names: Sequence[str], marks: Sequence[Mark]) -> str:
    every = [point for points in series for point in points]
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    low, high, ticks = _axis(min(y for _, y in every), max(y for _, y in every))

    def x_of(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((step - first) / (last - first) if last > first else 0.5)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(title)} over the steps">']
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{tick:.4g}</text>')
    for step in sorted({first, last}):
        anchor = "start" if step == first else "end"
        x, y = x_of(step), HEIGHT - 6
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">step {step:g}</text>')
    for mark in marks:
        if first <= mark.step <= last:
            top = HEIGHT - BOTTOM - 6 if mark.kind == "checkpoint" else TOP
            x = x_of(mark.step)
            parts.append(
                f'<line class="mark {mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{HEIGHT - BOTTOM:g}">'
                f"<title>{escape(mark.text)}</title></line>"
            )
    for n, points in enumerate(series):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="line c{n}" points="{path}"/>')
        if len(points) <= 60:
            parts += [f'<circle class="dot c{n}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2"/>' for x, y in points]
    parts += _hover(series, names, x_of)
    return "".join([*parts, "</svg>"])


def _hover(series: Sequence[Points], names: Sequence[str], x_of: object) -> list[str]:
    """A strip for every step, whose title has the figures: no script needed."""
    assert callable(x_of)
    told: dict[float, list[str]] = {}
    for points, name in zip(series, names, strict=True):
        for x, y in points:
            told.setdefault(x, []).append(f"{name} {y:.4g}")
    width = (WIDTH - LEFT - RIGHT) / max(len(told), 1)
    return [
        f'<rect class="strip" x="{x_of(x) - width / 2:.1f}" y="{TOP:g}" width="{width:.1f}" '
        f'height="{HEIGHT - TOP - BOTTOM:g}"><title>{escape(f"step {x:g}: " + ", ".join(texts))}</title></rect>'
        for x, texts in told.items()
    ]


def _finite(lines: Sequence[Json], metric: str) -> Points:
    steps, values = curve(lines, metric)
    return [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]


def _thinned(points: Points) -> Points:
    if len(points) <= MOST_POINTS:
        return points
    edges = [len(points) * n // MOST_POINTS for n in range(MOST_POINTS + 1)]
    pieces = [points[a:b] for a, b in pairwise(edges)]
    return [(piece[-1][0], sum(y for _, y in piece) / len(piece)) for piece in pieces]


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Ends and three to six round numbers between them."""
    if high == low:
        pad = abs(high) * 0.1
        low, high = (low - pad, high + pad) if pad else (0.0, 1.0)  # nearly every metric that is 0 is never below
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10) if power * unit >= raw)
    start, end = math.floor(low / step), math.ceil(high / step)
    return start * step, end * step, [n * step for n in range(start, end + 1)]
