"""Every prompt's pass rate over time, and the way from there to its rollouts."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from nicegui import events, ui

from mint.dashboard.charts import stacked
from mint.dashboard.data import Run
from mint.dashboard.frame import broken_lines, empty, go, help_mark, page, run_heading, run_link
from mint.dashboard.opening import opened
from mint.dashboard.plots import Plot
from mint.dashboard.site import Viewer
from mint.dashboard.theme import percent, preview, short
from mint.rl.ledger import EVIDENCE, STATES, Ledger, Visit

ROWS = 20
VISITS_SHOWN = 40
REFRESH_SECONDS = 1.0
MEANING = {
    "solved": f"The last {EVIDENCE} or more samples were all right: nothing left to learn from it.",
    "learning": "Right sometimes, or not tried often enough to say.",
    "dead": f"The last {EVIDENCE} or more samples were all wrong: as it stands it teaches nothing.",
}
ORDERS = {
    "rate": "lowest pass rate first",
    "gain": "largest gain first",
    "loss": "largest loss first",
    "name": "by name",
}


@dataclass(frozen=True)
class Problem:
    name: str
    state: str
    rate: float
    visits: list[Visit]

    @property
    def gain(self) -> float:
        return self.visits[-1].rate - self.visits[0].rate


def problems_of(ledger: Ledger) -> list[Problem]:
    names = list(ledger.visits)
    return [Problem(name, ledger.state(name), ledger.visits[name][-1].rate, ledger.visits[name]) for name in names]


def rate_color(rate: float) -> str:
    return f"hsl({round(2 + 158 * rate)} 62% {round(52 - 6 * rate)}%)"


class LedgerPage:
    def __init__(self, viewer: Viewer, run: Run) -> None:
        self.viewer, self.run = viewer, run
        self.ledger = run.ledger()
        self.problems = problems_of(self.ledger)
        self.state: str | None = None
        self.query = ""
        self.order = "rate"
        self.at = 0
        self.prompts: dict[str, str] = {}
        self.visits = sum(map(len, self.ledger.visits.values()))

    def build(self, problem: str | None) -> None:
        if not self.problems:
            empty(
                "No ledger yet",
                [
                    "The ledger is written by mint.rl at the end of every step, one entry a prompt. It appears here "
                    "with the first step; loops written by hand have none.",
                ],
            )
            return
        self.query = problem or ""
        self._overview()
        self._tools()
        with ui.element("div").classes("card").style("padding: 4px 6px"):
            self._table()
        self._fill()
        ui.timer(REFRESH_SECONDS, self._refresh)

    def _overview(self) -> None:
        counts = self.ledger.counts()
        with ui.element("div").classes("beside"):
            with ui.element("div").classes("card").style("padding: 6px 0"):
                for state in STATES:
                    with ui.element("div").classes("tile").style("border-left: 0"):
                        with ui.element("div").classes("flow"):
                            ui.label(state).classes(f"chip {state}")
                            ui.label(str(counts[state])).style("font-size: 20px; font-weight: 620")
                        ui.label(MEANING[state]).classes("more").style("white-space: normal")
            with ui.element("div").classes("card chart-card"):
                with ui.element("div").classes("title"):
                    ui.label("Prompts by state")
                    help_mark("How many of the prompts seen so far were solved, learning or dead after each step.")
                parts = [(state, self.run.series(f"ledger/{state}")) for state in STATES]
                options = stacked([part for part in parts if len(part[1])])
                for series, color in zip(options["series"], ("#12a37f", "#5b7cfa", "#e5484d"), strict=False):
                    series["itemStyle"] = {"color": color}
                Plot(options, run_link(self.viewer, self.run, "step") + "?step=")

    def _tools(self) -> None:
        with ui.element("div").classes("flow"):
            box = ui.input(value=self.query, placeholder="Search prompts", on_change=self._search)
            box.props("dense outlined clearable debounce=200").classes("search").style("width: 300px")
            states = {None: f"all {len(self.problems)}"} | {state: state for state in STATES}
            ui.toggle(states, value=None, on_change=self._filter).props("dense no-caps unelevated padding='4px 12px'")
            order = ui.select(ORDERS, value=self.order, on_change=self._sort)
            order.props("dense outlined options-dense").style("width: 210px")
            ui.element("div").classes("grow")
            self.where = ui.label().classes("muted")
            for by, text in ((-1, "◂"), (1, "▸")):
                with ui.element("button").classes("plain").on("click", lambda _, by=by: self._turn(by)):
                    ui.label(text)

    def _table(self) -> None:
        columns = [
            {"name": "prompt", "label": "Prompt", "field": "prompt", "align": "left"},
            {"name": "state", "label": "State", "field": "state", "align": "left"},
            {"name": "rate", "label": "Pass rate", "field": "rate", "align": "right"},
            {"name": "change", "label": "Since first seen", "field": "change", "align": "right"},
            {"name": "strip", "label": "Every visit; click one to see its samples", "field": "strip", "align": "left"},
        ]
        self.table = ui.table(columns=columns, rows=[], row_key="name").style("width: 100%")
        self.table.props("flat dense hide-pagination :rows-per-page-options='[0]'")
        cells = {
            "prompt": '<div style="max-width:460px;overflow:hidden;text-overflow:ellipsis">{{ props.row.prompt }}</div>'
            '<div class="sub mono">{{ props.row.id }}</div>',
            "state": '<span class="chip" :class="props.row.state">{{ props.row.state }}</span>',
            "strip": '<span v-html="props.row.strip" @click.stop></span>',
        }
        for name, cell in cells.items():
            self.table.add_slot(f"body-cell-{name}", f'<q-td :props="props">{cell}</q-td>')
        self.table.on("rowClick", lambda event: go(self.viewer, event.args[1]["link"]))

    # ------------------------------------------------------------------------------------------------ rows

    def _shown(self) -> list[Problem]:
        wanted = self.query.lower()
        shown = [p for p in self.problems if self.state in (None, p.state)]
        if wanted:
            shown = [p for p in shown if wanted in p.name.lower() or wanted in self._prompt(p).lower()]
        by: dict[str, Any] = {
            "rate": lambda p: (p.rate, p.name),
            "gain": lambda p: (-p.gain, p.name),
            "loss": lambda p: (p.gain, p.name),
            "name": lambda p: p.name,
        }
        return sorted(shown, key=by[self.order])

    def _prompt(self, problem: Problem) -> str:
        """From its latest rollouts; a problem's name may be a digest."""
        if problem.name not in self.prompts:
            index = self.run.rollouts.step(problem.visits[-1].step)
            found = [group.prompt for group in index.groups.values() if group.problem == problem.name] if index else []
            if index is not None:
                for group in index.groups.values():
                    if group.problem is not None:
                        self.prompts.setdefault(group.problem, group.prompt)
            self.prompts[problem.name] = found[0] if found else problem.name
        return self.prompts[problem.name]

    def _row(self, problem: Problem) -> dict[str, Any]:
        prompt = self._prompt(problem)
        last = problem.visits[-1]
        change = 100 * problem.gain
        return {
            "name": problem.name,
            "prompt": preview(prompt, 140),
            "id": "" if prompt == problem.name else short(problem.name, 60),
            "state": problem.state,
            "rate": percent(problem.rate),
            "change": f"{change:+.0f} %".replace("-", "−") if len(problem.visits) > 1 else "–",
            "strip": self._strip(problem),
            "link": self._link(problem, last),
        }

    def _link(self, problem: Problem, visit: Visit) -> str:
        return run_link(self.viewer, self.run, "step", step=visit.step, problem=problem.name)

    def _strip(self, problem: Problem) -> str:
        cells = "".join(
            f'<a href="{html.escape(self._link(problem, visit))}" style="background:{rate_color(visit.rate)}" '
            f'title="step {visit.step}: {percent(visit.rate)} of {visit.of} samples"></a>'
            for visit in problem.visits[-VISITS_SHOWN:]
        )
        return f'<div class="strip">{cells}</div>'

    def _fill(self) -> None:
        shown = self._shown()
        self.at = max(min(self.at, (len(shown) - 1) // ROWS * ROWS), 0)
        self.table.rows = [self._row(problem) for problem in shown[self.at : self.at + ROWS]]
        last = min(self.at + ROWS, len(shown))
        self.where.set_text(f"{self.at + 1} to {last} of {len(shown)}" if shown else "none")

    # ------------------------------------------------------------------------------------------------ what happens

    def _search(self, event: events.ValueChangeEventArguments) -> None:
        self.query, self.at = event.value or "", 0
        self._fill()

    def _filter(self, event: events.ValueChangeEventArguments) -> None:
        self.state, self.at = event.value, 0
        self._fill()

    def _sort(self, event: events.ValueChangeEventArguments) -> None:
        self.order, self.at = event.value, 0
        self._fill()

    def _turn(self, by: int) -> None:
        self.at += by * ROWS
        self._fill()

    def _refresh(self) -> None:
        self.ledger = self.run.ledger()
        visits = sum(map(len, self.ledger.visits.values()))
        if visits != self.visits:
            self.visits = visits
            self.problems = problems_of(self.ledger)
            self._fill()


@ui.page("/ledger/{name:path}")
def ledger_page(request: Request, name: str, problem: str | None = None) -> None:
    with page(request, f"{name}, ledger", "Runs") as viewer:
        run = opened(viewer, name)
        if run is not None:
            run_heading(viewer, run, "Ledger")
            broken_lines(run)
            LedgerPage(viewer, run).build(problem)
