"""One run: its headline figures, its curves with alarms and checkpoints marked, its configuration."""

from __future__ import annotations

import asyncio
import html
import json

from fastapi import Request
from nicegui import events, ui

from mint.dashboard.charts import marks_of
from mint.dashboard.data import Run
from mint.dashboard.frame import (
    banner,
    broken_lines,
    empty,
    help_mark,
    markup,
    page,
    run_heading,
    run_link,
    section,
    tiles_html,
)
from mint.dashboard.opening import opened
from mint.dashboard.panels import SECTIONS, SPEED, Drawing, Now, Panel, last_speed, one
from mint.dashboard.plots import Plot
from mint.dashboard.site import Viewer
from mint.dashboard.theme import NOTHING, STATUS_WORDS, ago, duration, number
from mint.rl.rundir import HOLDOUT, REWARD

REFRESH_SECONDS = 0.25
FLUSH_SECONDS = 0.015
"""NiceGUI sends what has gathered every hundredth of a second."""


class RunPage:
    def __init__(self, viewer: Viewer, run: Run) -> None:
        self.viewer, self.run = viewer, run
        self.smoothing = 0.0
        self.seen: tuple[int, str] = (-1, "")
        self.plots: list[tuple[Plot, Drawing, ui.label, Now]] = []

    def build(self) -> None:
        run = self.run
        broken_lines(run)
        if run.config_fault:
            banner("alarm", f"{run.config_fault} Restore or remove it; the curves are shown all the same.")
        if run.last_step < 0:
            self._starting()
            return
        self.tiles = markup(self._tiles()).classes("card")
        self._tools()
        for title, panels in SECTIONS:
            present = [panel for panel in panels if panel.lines(run)]
            if not present:
                continue
            section(title)
            with ui.element("div").classes("charts"):
                for panel in present:
                    self._chart(panel.title, panel.why, panel.options, panel.now)
        if len(run.series("time/total")):
            section("Speed")
            with ui.element("div").classes("charts"):
                for title, why, draw, now in SPEED:
                    self._chart(title, why, draw, now)
        self._further()
        self._configuration()
        ui.timer(REFRESH_SECONDS, self._refresh)

    def _starting(self) -> None:
        status = self.run.status
        if status == "stopped":
            empty(
                "This run ended before its first step",
                ["Nothing was written after its configuration. The end of its log says why:"],
                _end_of(self.run),
            )
        else:
            empty(
                "This run is starting",
                [
                    "Its configuration is written; curves appear with the first step. Loading the model and the first "
                    "evaluation come before that.",
                ],
                _end_of(self.run),
            )
            ui.timer(REFRESH_SECONDS, lambda: ui.navigate.reload() if self.run.refresh() > 0 else None)
        self._configuration()

    # ------------------------------------------------------------------------------------------------ parts

    def _tiles(self) -> str:
        """The headline figures as HTML."""
        run = self.run
        reward, holdout, total = run.series(*REWARD), run.series(*HOLDOUT), run.total_steps
        going = run.status == "running"
        share = min(100 * run.trained_steps / total, 100) if total else 0
        of = f'<span class="faint" style="font-size:15px"> / {total}</span>' if total else ""
        alarms = run.alarms
        worst = "alarm" if any(a.severity == "alarm" for a in alarms) else "warning" if alarms else ""
        told = html.escape(", ".join(dict.fromkeys(a.kind.replace("_", " ") for a in alarms))) or "nothing to report"
        status = f'<span class="chip {run.status}" title="{html.escape(STATUS_WORDS[run.status])}">{run.status}</span>'
        doctor = f'<a href="{run_link(self.viewer, run, "doctor")}" class="{worst}" title="{told}">{len(alarms)}</a>'
        tiles = [
            ("Status", status, f"seed {html.escape(str(run.config.get('seed', NOTHING)))}"),
            (
                "Progress",
                f"{run.trained_steps}{of}",
                f'<div class="bar"><div style="width:{share:.0f}%"></div></div>',
            ),
            ("Reward", number(run.last(*REWARD)), f"began at {number(next(iter(reward.values), None))}"),
            (
                "Held out",
                number(run.last(*HOLDOUT)),
                f"began at {number(holdout.values[0])}" if holdout.values else "not measured",
            ),
            (
                "Time left" if going else "Took",
                duration(run.seconds_left if going else sum(run.series("time/total").values)),
                f"{duration(run.step_seconds)} a step",
            ),
            ("Tokens a second", last_speed(run), "sampled"),
            ("Checkpoints", number(len(run.checkpoints)), f"written {ago(run.touched)}"),
            ("Doctor", doctor, told),
        ]
        return tiles_html(tiles)

    def _tools(self) -> None:
        with ui.element("div").classes("flow"):
            ui.label("Smoothing").classes("muted")
            ui.slider(min=0, max=0.95, step=0.05, value=0, on_change=self._smooth).style("width: 150px")
            ui.element("div").classes("grow")
            markup(
                '<span class="faint" style="font-size:12.5px">Click a point to see the samples of its step · lines: '
                '<span class="alarm">alarm</span>, <span class="warning">warning</span>, dotted: checkpoint</span>'
            )

    def _chart(self, title: str, why: str, draw: Drawing, now: Now) -> None:
        with ui.element("div").classes("card chart-card"):
            with ui.element("div").classes("title"):
                ui.label(title)
                help_mark(why)
                shown = ui.label(now(self.run)).classes("now")
            options = draw(self.run, self.smoothing, marks_of(self.run))
            plot = Plot(options, run_link(self.viewer, self.run, "step") + "?step=", "run")
        self.plots.append((plot, draw, shown, now))

    def _further(self) -> None:
        section("Any other metric")
        with ui.element("div").classes("card").style("padding: 12px 14px"):
            box = ui.element("div").classes("charts")
            picked = ui.select(self.run.names, multiple=True, with_input=True, label="Choose metrics to plot")
            picked.props("dense outlined options-dense use-chips").classes("search")
            picked.style("min-width: min(420px, 100%)")
            shown: set[str] = set()

            def add(event: events.ValueChangeEventArguments) -> None:
                for name in [name for name in event.value if name not in shown]:
                    shown.add(name)
                    with box:
                        panel = Panel(name, "As it stands in metrics.jsonl.", one(name, name))
                        self._chart(panel.title, panel.why, panel.options, panel.now)

            picked.on_value_change(add)

    def _configuration(self) -> None:
        config = self.run.config
        if not config:
            return
        section("Configuration")
        pairs = "".join(
            f'<div><span class="k">{html.escape(name)}</span><span class="v">{html.escape(_value(value))}</span></div>'
            for name, value in config.items()
        )
        with ui.element("div").classes("card").style("padding: 10px 16px 14px"):
            markup(f'<div class="pairs">{pairs}</div>')

    # ------------------------------------------------------------------------------------------------ what happens

    async def _smooth(self, event: events.ValueChangeEventArguments) -> None:
        self.smoothing = float(event.value)
        await self._draw()

    async def _refresh(self) -> None:
        seen = (self.run.refresh(), self.run.status)
        if seen != self.seen:
            self.seen = seen
            self.tiles.set_content(self._tiles())
            await self._draw()

    async def _draw(self) -> None:
        """From the top, each chart in a message of its own, so that what is in view is new first."""
        marks = marks_of(self.run)
        for plot, draw, shown, now in list(self.plots):
            await asyncio.sleep(FLUSH_SECONDS)
            plot.draw(draw(self.run, self.smoothing, marks))
            shown.set_text(now(self.run))


def _value(value: object) -> str:
    if isinstance(value, str):
        return value
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


def _end_of(run: Run, lines: int = 8) -> str | None:
    try:
        return "\n".join(run.dir.log_file.read_text(errors="replace").splitlines()[-lines:]) or None
    except OSError:
        return None


@ui.page("/run/{name:path}")
def run_page(request: Request, name: str) -> None:
    with page(request, name, "Runs") as viewer:
        run = opened(viewer, name)
        if run is not None:
            run_heading(viewer, run, "Curves")
            RunPage(viewer, run).build()
