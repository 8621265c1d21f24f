"""All runs at a glance, and several of them on one plot."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fastapi import Request
from nicegui import events, ui
from nicegui import run as background

from mint.dashboard.charts import Line, line_chart, sparkline
from mint.dashboard.curves import joined
from mint.dashboard.data import Run
from mint.dashboard.frame import empty, go, page, run_link
from mint.dashboard.plots import Plot
from mint.dashboard.site import HOUSE, Viewer
from mint.dashboard.theme import NOTHING, PALETTE, STATUS_WORDS, ago, duration, number
from mint.rl.rundir import HOLDOUT, REWARD

REFRESH_SECONDS = 1.0
COMPARED = 6
"""Runs on the plot before anything is chosen."""
COMMON = ("reward", "held-out reward")
CELLS = {
    "name": '<div class="name">{{ props.row.name }}</div><div class="sub">{{ props.row.sub }}</div>',
    "status": '<span class="chip" :class="props.row.status" :title="props.row.words">{{ props.row.status }}</span>',
    "progress": '<div style="width: 130px">{{ props.row.steps }}<span class="faint"> {{ props.row.left }}</span>'
    '<div class="bar"><div :style="{width: props.row.share + \'%\'}"></div></div></div>',
    "spark": '<span v-html="props.row.spark"></span>',
    "alarms": '<span v-if="props.row.alarms" class="chip alarm" :title="props.row.told">{{ props.row.alarms }}</span>'
    '<span v-else-if="props.row.warnings" class="chip warning" :title="props.row.told">{{ props.row.warnings }}</span>'
    '<span v-else class="faint">none</span>',
}


def row(viewer: Viewer, run: Run) -> dict[str, Any]:
    """A run in the table."""
    total, alarms = run.total_steps, run.alarms
    done = run.trained_steps
    left = run.seconds_left
    sub = " · ".join(str(run.config[name]) for name in ("recipe_name", "model_name") if run.config.get(name))
    return {
        "name": run.name,
        "link": run_link(viewer, run),
        "sub": sub or "loop written by hand",
        "status": run.status,
        "words": STATUS_WORDS[run.status],
        "steps": f"{done} / {total}" if total else str(done),
        "share": round(100 * min(done / total, 1)) if total else 0,
        "left": f"{duration(left)} left" if left is not None else "",
        "spark": sparkline(run.series(*REWARD)),
        "reward": number(run.last(*REWARD)),
        "reward_value": run.last(*REWARD) if run.last(*REWARD) is not None else -1e30,
        "holdout": number(run.last(*HOLDOUT)),
        "alarms": sum(alarm.severity == "alarm" for alarm in alarms),
        "warnings": sum(alarm.severity != "alarm" for alarm in alarms),
        "told": ", ".join(dict.fromkeys(f"{alarm.kind} (step {alarm.step})" for alarm in alarms)),
        "touched": ago(run.touched),
        "moment": run.touched,
    }


COLUMNS: list[dict[str, Any]] = [
    {"name": "name", "label": "Run", "field": "name", "align": "left", "sortable": True},
    {"name": "status", "label": "Status", "field": "status", "align": "left", "sortable": True},
    {"name": "progress", "label": "Steps", "field": "share", "align": "left", "sortable": True},
    {"name": "spark", "label": "Reward over steps", "field": "spark", "align": "left"},
    {"name": "reward", "label": "Reward", "field": "reward", "align": "right", "sortable": True},
    {"name": "holdout", "label": "Held out", "field": "holdout", "align": "right", "sortable": True},
    {"name": "alarms", "label": "Alarms", "field": "alarms", "align": "left", "sortable": True},
    {"name": "touched", "label": "Last written", "field": "touched", "align": "right"},
]


class RunsPage:
    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer
        self.runs: list[Run] = []
        self.chosen: list[str] = []
        self.metric = COMMON[0]
        self.smoothing = 0.0
        self.by_seed = False
        self.seen: object = None

    def build(self) -> None:
        self.box = ui.element("div").style("display: flex; flex-direction: column; gap: 14px")
        with self.box:
            ui.label("Reading runs…").classes("muted")
        ui.timer(0, self._open, once=True)

    async def _open(self) -> None:
        await self._read()
        self.chosen = [run.name for run in self.runs if len(run.series(*REWARD)) > 1][:COMPARED]
        self.box.clear()
        with self.box:
            if not self.runs:
                self._nothing()
                ui.timer(REFRESH_SECONDS, self._appear)
                return
            self._compare()
            self._table()
            ui.timer(REFRESH_SECONDS, self._refresh)

    async def _read(self) -> None:
        """In a thread: many long runs take seconds when they are read for the first time."""
        self.runs = await background.io_bound(self.viewer.library.runs) or []

    def _nothing(self) -> None:
        folder = self.viewer.library.folder
        if self.viewer.owner != HOUSE:
            told = f"Runs appear here once they are in the folder {folder.name} of the server's runs folder."
            empty("No runs yet", [told])
            return
        missing = "" if folder.is_dir() else ", which does not exist yet"
        empty(
            "No runs yet",
            [f"Runs appear here as soon as they start. This page looks in {folder}{missing}."],
            f"python recipes/math_rl.py log_path={folder}/first\nmint dashboard FOLDER    # to look elsewhere",
        )

    def _appear(self) -> None:
        if self.viewer.library.names():
            ui.navigate.reload()

    # ------------------------------------------------------------------------------------------------ compare

    def _compare(self) -> None:
        with ui.element("div").classes("card chart-card tall"):
            with ui.element("div").classes("flow").style("padding: 0 2px 8px"):
                ui.label("Compare").style("font-weight: 650; font-size: 15px")
                names = list(COMMON) + sorted({name for run in self.runs for name in run.names})
                picked = ui.select(names, value=self.metric, with_input=True, on_change=self._set_metric)
                picked.props("dense outlined options-dense").style("width: 270px")
                ui.element("div").classes("grow")
                ui.label("Smoothing").classes("muted")
                slider = ui.slider(min=0, max=0.95, step=0.05, value=self.smoothing, on_change=self._set_smoothing)
                slider.style("width: 120px")
                with slider:
                    ui.tooltip("Exponential moving average; what was measured stays visible behind it.")
                seeds = ui.switch("Join seeds", value=self.by_seed, on_change=self._set_by_seed)
                with seeds:
                    ui.tooltip(
                        "Runs that differ only in their seed become one curve: the mean, with its 95 % interval "
                        "(Student's t over seeds)."
                    )
            self.plot = Plot(self._options())

    def _set_metric(self, event: events.ValueChangeEventArguments) -> None:
        self.metric = event.value or COMMON[0]
        self.plot.draw(self._options())

    def _set_smoothing(self, event: events.ValueChangeEventArguments) -> None:
        self.smoothing = float(event.value)
        self.plot.draw(self._options())

    def _set_by_seed(self, event: events.ValueChangeEventArguments) -> None:
        self.by_seed = bool(event.value)
        self.plot.draw(self._options())

    def _options(self) -> dict[str, Any]:
        names = {COMMON[0]: REWARD, COMMON[1]: HOLDOUT}.get(self.metric, (self.metric,))
        runs = [run for run in self.runs if run.name in self.chosen and len(run.series(*names))]
        return line_chart(lines_of(runs, names, self.by_seed), self.smoothing, legend=True)

    # ------------------------------------------------------------------------------------------------ table

    def _table(self) -> None:
        rows = [row(self.viewer, run) for run in self.runs]
        with ui.element("div").classes("card").style("padding: 4px 6px"):
            self.table = ui.table(columns=COLUMNS, rows=rows, row_key="name", selection="multiple", pagination=25)
            self.table.props("flat dense hide-selected-banner").classes("w-full").style("width: 100%")
            if len(rows) <= 25:
                self.table.props("hide-pagination")
            for name, cell in CELLS.items():
                self.table.add_slot(f"body-cell-{name}", f'<q-td :props="props">{cell}</q-td>')
            self.table.selected = [line for line in rows if line["name"] in self.chosen]
            self.table.on_select(self._select)
            self.table.on("rowClick", lambda event: go(self.viewer, event.args[1]["link"]))

    def _select(self) -> None:
        self.chosen = [line["name"] for line in self.table.selected]
        self.plot.draw(self._options())

    async def _refresh(self) -> None:
        before = [run.name for run in self.runs]
        await self._read()
        names = [run.name for run in self.runs]
        self.chosen += [name for name in names if name not in before and len(self.chosen) < COMPARED]
        seen = [(run.name, run.version, run.status) for run in self.runs]
        rows = [row(self.viewer, run) for run in self.runs]
        if seen != self.seen:
            if self.seen is not None:
                self.plot.draw(self._options())
            self.seen = seen
        if rows != self.table.rows:
            self.table.rows = rows


def lines_of(runs: list[Run], names: tuple[str, ...], by_seed: bool) -> list[Line]:
    if not by_seed:
        return [Line(run.name, run.series(*names), PALETTE[i % len(PALETTE)]) for i, run in enumerate(runs)]
    families: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        families[run.family].append(run)
    lines = []
    for i, family in enumerate(families.values()):
        mean, half = joined([run.series(*names) for run in family])
        label = family[0].name if len(family) == 1 else f"{common_name(family)} ({len(family)} runs)"
        lines.append(Line(label, mean, PALETTE[i % len(PALETTE)], band=half if len(family) > 1 else None))
    return lines


def common_name(family: list[Run]) -> str:
    """What the names of these runs begin with."""
    names = [run.name for run in family]
    shared = 0
    while all(len(name) > shared and name[shared] == names[0][shared] for name in names):
        shared += 1
    return names[0][:shared].rstrip("/-_. 0123456789") or names[0] or NOTHING


@ui.page("/")
def runs_page(request: Request) -> None:
    with page(request, "Runs", "Runs") as viewer:
        RunsPage(viewer).build()
