"""Curves of runs as a PNG, drawn from their run directories. Needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mint.errors import BadRequest
from mint.rl.rundir import Json, RunDir

PANELS: list[tuple[str, tuple[str, ...]]] = [
    ("reward", ("env/all/reward/total", "test/env/all/reward/total")),
    ("groups", ("env/all/by_group/frac_mixed", "env/all/by_group/frac_all_good", "env/all/by_group/frac_all_bad")),
    ("tokens per turn", ("env/all/ac_tokens_per_turn",)),
    ("truncated", ("env/all/truncated",)),
    ("KL", ("kl_policy_base", "optim/kl_sample_train_v1", "kl_pre_post_v1")),
    ("entropy", ("optim/entropy",)),
    ("learning rate", ("optim/lr",)),
    ("seconds a step", ("time/total",)),
]
"""Title and metrics of each panel; one whose metrics a run lacks is left out."""
COLUMNS = 2


def curve(lines: Sequence[Json], metric: str) -> tuple[list[int], list[float]]:
    """Steps and values, for the steps that logged the metric."""
    points = [(line["step"], line[metric]) for line in lines if metric in line]
    return [step for step, _ in points], [value for _, value in points]


def plot_runs(
    paths: str | Path | Sequence[str | Path], out: str | Path | None = None, metrics: Sequence[str] | None = None
) -> Path:
    """Draws one run, or several on the same axes. `metrics` draws just these, a panel each. `out` is by default
    plot.png in the first run directory; returned is where the picture is."""
    runs = [RunDir(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    lines = {run.path.name: run.metrics() for run in runs}
    if empty := [name for name, some in lines.items() if not some]:
        raise BadRequest(f"{empty[0]} has no metrics yet; nothing to plot.")
    panels = [(metric, (metric,)) for metric in metrics] if metrics else PANELS
    logged = {name for some in lines.values() for line in some for name in line}
    panels = [(title, names) for title, names in panels if logged & set(names)]
    if not panels:
        raise BadRequest(f"none of {', '.join(metrics or [])} was logged; there are {', '.join(sorted(logged))}.")
    target = Path(out) if out is not None else runs[0].path / "plot.png"
    _draw(panels, lines, target)
    return target


def _draw(panels: Sequence[tuple[str, Sequence[str]]], lines: dict[str, list[Json]], target: Path) -> None:
    figure_class = _figure_class()
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = figure_class(figsize=(6 * columns, 3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, (title, names) in zip(axes.flat, panels, strict=False):
        for run, some in lines.items():
            for metric in names:
                steps, values = curve(some, metric)
                if steps:
                    label = metric if len(lines) == 1 else f"{run}: {metric}"
                    axis.plot(steps, values, marker="." if len(steps) < 50 else None, linewidth=1.2, label=label)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(target, dpi=120)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadRequest("plots need the package 'matplotlib': pip install matplotlib") from error
    return Figure
