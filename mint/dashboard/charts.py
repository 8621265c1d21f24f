"""ECharts options for the pages. Colours are such that one chart serves light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mint.dashboard.curves import aligned, finite, smoothed, thinned
from mint.dashboard.data import Run, Series
from mint.dashboard.theme import AXIS, GRID, PALETTE, SEVERITY

Options = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    name: str
    series: Series
    color: str
    dots: bool = False
    """For what is measured now and then, as on the held-out set."""
    band: Sequence[float] | None = None
    """Half width of an interval around it."""


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step."""

    step: int
    color: str
    text: str
    dashed: bool = False


def marks_of(run: Run) -> list[Mark]:
    """Alarms and checkpoints of a run."""
    told = [Mark(a.step, SEVERITY.get(a.severity, AXIS), f"{a.severity}: {a.kind}") for a in run.alarms]
    saved = [
        Mark(int(line["batch"]), AXIS, f"checkpoint {line.get('name', '')}", dashed=True)
        for line in run.checkpoints
        if isinstance(line.get("batch"), int)
    ]
    return saved + told


LABEL: Options = {"color": AXIS, "fontSize": 10.5}
LEGEND: Options = {
    "top": 0,
    "left": 4,
    "itemWidth": 14,
    "itemHeight": 3,
    "itemGap": 14,
    "icon": "roundRect",
    "type": "scroll",
    "pageIconColor": AXIS,
    "pageTextStyle": {"color": AXIS},
    "textStyle": {"color": AXIS, "fontSize": 11, "fontFamily": "inherit"},
}
TOOLTIP: Options = {
    "trigger": "axis",
    "confine": True,
    "className": "chart-tip",
    "axisPointer": {"type": "line", "lineStyle": {"color": AXIS, "type": "solid", "opacity": 0.6}},
    ":formatter": "window.mint.tooltip",
}
STEP_AXIS: Options = {
    "type": "value",
    "min": "dataMin",
    "max": "dataMax",
    "minInterval": 1,
    "axisLine": {"lineStyle": {"color": GRID}},
    "axisTick": {"show": False},
    "axisLabel": LABEL | {"hideOverlap": True},
    "splitLine": {"show": False},
}


def line_chart(
    lines: Sequence[Line],
    smoothing: float = 0.0,
    marks: Sequence[Mark] = (),
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    legend: bool | None = None,
    share: bool = False,
) -> Options:
    """Curves over steps; `share`: of one, read as per cent. With smoothing, the smoothed curve stands over a pale one
    of what was measured."""
    series: list[Options] = []
    for line in lines:
        series += _series_of(line, smoothing)
    if series:
        series[0]["markLine"] = _mark_lines(marks)
    shown = len(lines) > 1 if legend is None else legend
    return {
        "animation": False,
        "grid": {"left": 8, "right": 14, "top": 30 if shown else 12, "bottom": 4, "containLabel": True},
        "legend": LEGEND | {"show": shown, "data": [line.name for line in lines]},
        "tooltip": TOOLTIP,
        "xAxis": STEP_AXIS,
        "yAxis": _value_axis(low, high, share, log),
        "series": series,
    }


def _value_axis(low: float | None, high: float | None, share: bool, log: bool) -> Options:
    return {
        "type": "log" if log else "value",
        "min": low,
        "max": high,
        "scale": True,
        "splitNumber": 4,
        **({"interval": 0.25} if share else {}),
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "axisLabel": LABEL | {":formatter": "window.mint.percent" if share else "window.mint.short"},
        "splitLine": {"lineStyle": {"color": GRID}},
    }


def _series_of(line: Line, smoothing: float) -> list[Options]:
    measured = finite(line.series)
    smooth = smoothing > 0 and not line.dots and len(measured) > 2
    shown = thinned(smoothed(measured, smoothing) if smooth else measured)
    result = []
    if line.band is not None:
        result += _band(line, measured)
    main = _line(line.name, shown, line.color, 2.0)
    if line.dots:
        main |= {"symbol": "circle", "symbolSize": 6, "showSymbol": True}
    result.append(main)
    if smooth:
        pale = _line(f"{line.name} (measured)", thinned(measured), line.color, 1.0)
        pale["lineStyle"]["opacity"] = 0.25
        result.append(pale | {"z": 1, "legendHoverLink": False})
    return result


def _line(name: str, series: Series, color: str, width: float) -> Options:
    return {
        "type": "line",
        "name": name,
        "data": [[s, _round(v)] for s, v in zip(series.steps, series.values, strict=True)],
        "symbol": "circle",
        "symbolSize": 7,
        "showSymbol": len(series) == 1,
        "lineStyle": {"width": width, "color": color},
        "itemStyle": {"color": color},
        "emphasis": {"disabled": True},
        "z": 3,
    }


def _band(line: Line, measured: Series) -> list[Options]:
    assert line.band is not None
    common: Options = {
        "type": "line",
        "stack": f"band {line.name}",
        "stackStrategy": "all",
        "symbol": "none",
        "lineStyle": {"opacity": 0},
        "silent": True,
        "tooltip": {"show": False},
        "z": 1,
    }
    low = [[s, _round(v - h)] for s, v, h in zip(measured.steps, measured.values, line.band, strict=True)]
    wide = [[s, _round(2 * h)] for s, h in zip(measured.steps, line.band, strict=True)]
    filled = {"areaStyle": {"color": line.color, "opacity": 0.16}}
    return [
        common | {"name": f"{line.name} (low)", "data": low},
        common | {"name": f"{line.name} (band)", "data": wide} | filled,
    ]


def _round(value: float) -> float:
    """Six digits are more than a screen shows, and half of what would be sent."""
    return float(f"{value:.6g}")


def _mark_lines(marks: Sequence[Mark]) -> Options:
    return {
        "symbol": ["none", "none"],
        "animation": False,
        "label": {"show": False},
        "emphasis": {"label": {"show": True, "position": "insideEndTop", "fontSize": 10.5, ":formatter": MARK_NAME}},
        "data": [
            {
                "xAxis": mark.step,
                "name": mark.text,
                "lineStyle": {
                    "color": mark.color,
                    "width": 1 if mark.dashed else 1.4,
                    "type": [2, 4] if mark.dashed else "solid",
                    "opacity": 0.55 if mark.dashed else 0.85,
                },
            }
            for mark in marks
        ],
    }


MARK_NAME = "p => p.name"


def stacked(parts: Sequence[tuple[str, Series]], legend: bool = True) -> Options:
    """Shares of a whole over steps, such as where the time goes. What a step says nothing of had no share in it."""
    names, over_same_steps = [name for name, _ in parts], aligned([series for _, series in parts])
    lines = [Line(n, s, PALETTE[i % len(PALETTE)]) for i, (n, s) in enumerate(zip(names, over_same_steps, strict=True))]
    options = line_chart(lines)
    for series in options["series"]:
        series |= {"stack": "all", "areaStyle": {"opacity": 0.55}, "lineStyle": {"width": 0}}
    options["yAxis"]["scale"] = False
    options["legend"]["show"] = legend
    options["grid"]["top"] = 30 if legend else 12
    return options


def sparkline(series: Series, width: int = 120, height: int = 28) -> str:
    """A curve as SVG, small enough for a table cell; numbers only, so there is nothing to escape."""
    kept = thinned(finite(series), 60)
    if len(kept) < 2:
        return ""
    low, high = min(kept.values), max(kept.values)
    span, first, last = (high - low) or 1.0, kept.steps[0], kept.steps[-1]
    xs = [2 + (width - 4) * (step - first) / ((last - first) or 1) for step in kept.steps]
    ys = [height - 3 - (height - 6) * (value - low) / span for value in kept.values]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return (
        f'<svg class="spark" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<polygon points="{xs[0]:.1f},{height} {path} {xs[-1]:.1f},{height}"/><polyline points="{path}"/>'
        f'<circle cx="{xs[-1]:.1f}" cy="{ys[-1]:.1f}" r="2.2"/></svg>'
    )
