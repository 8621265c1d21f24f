"""What is wrong with a run: findings with evidence and remedy, and the samples that show them."""

from __future__ import annotations

import html
from typing import Any

from fastapi import Request
from nicegui import run as background
from nicegui import ui

from mint.dashboard.data import Run
from mint.dashboard.frame import banner, broken_lines, empty, markup, page, run_heading, run_link
from mint.dashboard.opening import opened
from mint.dashboard.site import Viewer
from mint.dashboard.theme import number, short, size
from mint.errors import MintError
from mint.rl.doctor import diagnose

AT_ONCE = 40_000_000
"""Bytes of rollouts that are examined without being asked: a second or two."""
REFRESH_SECONDS = 2.0


class DoctorPage:
    def __init__(self, viewer: Viewer, run: Run) -> None:
        self.viewer, self.run = viewer, run
        self.seen = run.version

    def build(self) -> None:
        self.bytes = sum(file.stat().st_size for file in self.run.dir.rollouts_folder.glob("*.jsonl"))
        if not self.bytes:
            empty(
                "Nothing to examine yet",
                ["The doctor reads rollouts, which are written with every step. Come back when the first is done."],
            )
            return
        with ui.element("div").classes("flow"):
            self.note = ui.label().classes("muted")
            ui.element("div").classes("grow")
            self.button = ui.element("button").classes("plain").on("click", self._examine)
            with self.button:
                ui.label("Examine the whole run again")
        self.list = ui.element("div").style("display: flex; flex-direction: column; gap: 12px")
        if self.bytes <= AT_ONCE:
            ui.timer(0, self._examine, once=True)
            self.note.set_text("Examining…")
        else:
            self._show([line for line in self.run.health if "kind" in line])
            self.note.set_text(
                f"What the doctor said while the run went on. Examining {size(self.bytes)} of rollouts takes longer."
            )
        ui.timer(REFRESH_SECONDS, self._refresh)

    async def _examine(self) -> None:
        self.note.set_text("Examining every step…")
        try:
            findings = await background.io_bound(diagnose, self.run.dir)
        except MintError as error:
            self.list.clear()
            with self.list:
                banner("alarm", f"The run could not be examined: {error}")
            self.note.set_text("")
            return
        steps = len(self.run.rollouts.steps())
        self.note.set_text(
            f"Examined {steps} steps. The likeliest cause comes first; what follows from it stands behind."
        )
        self._show([finding.to_json() for finding in findings or []])

    def _refresh(self) -> None:
        """A run that goes on is told of by the doctor in its loop."""
        if self.run.refresh() != self.seen and self.bytes > AT_ONCE:
            self.seen = self.run.version
            self._show([line for line in self.run.health if "kind" in line])

    def _show(self, findings: list[dict[str, Any]]) -> None:
        self.list.clear()
        with self.list:
            if not findings:
                empty(
                    "Nothing to report",
                    [
                        "No check found anything wrong: rewards vary within groups, answers end by themselves, sampler "
                        "and trainer agree, the policy moves and has not collapsed.",
                    ],
                )
            for finding in findings:
                self._card(finding)

    def _card(self, finding: dict[str, Any]) -> None:
        first, last = finding.get("steps") or (finding.get("step", 0),) * 2
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        severity, kind, follows = (words(finding.get(name)) for name in ("severity", "kind", "follows_from"))
        behind = f'<span class="chip">follows from {follows}</span>' if follows else ""
        figures = "".join(
            f'<span class="chip">{words(name)} <b>&nbsp;{html.escape(_figure(value))}</b></span>'
            for name, value in (finding.get("evidence") or {}).items()
        )
        sentence, remedy = (html.escape(str(finding.get(name, ""))) for name in ("sentence", "remedy"))
        link = run_link(self.viewer, self.run, "step", step=last)
        samples = "".join(map(self._sample, finding.get("samples") or []))
        markup(
            f'<div class="card finding {severity}"><div class="flow"><span class="chip {severity}">{severity}</span>'
            f'<b>{kind}</b><a class="chip" href="{link}">{where}</a>{behind}</div><h3>{sentence}</h3>'
            f'<div class="flow">{figures}</div><div class="remedy"><b>What to do</b>&ensp;{remedy}</div>{samples}</div>'
        )

    def _sample(self, sample: dict[str, Any]) -> str:
        link = run_link(
            self.viewer, self.run, "step", step=sample["step"], group=sample["group"], member=sample["member"]
        )
        reference = sample.get("reference")
        wanted = f' <span class="faint">expected {html.escape(str(reference))}</span>' if reference is not None else ""
        return (
            f'<a class="sample" href="{link}"><span class="muted">step {sample["step"]}, group {sample["group"]}, '
            f'#{sample["member"]}</span><span class="text"><span class="faint">'
            f"{html.escape(short(str(sample.get('prompt', '')), 120))}</span> "
            f"{html.escape(short(str(sample.get('completion', '')), 160))}{wanted}</span>"
            f"<span>reward <b>{number(sample.get('reward'))}</b></span></a>"
        )


def words(name: object) -> str:
    """A name of ours as words, fit for HTML."""
    return html.escape(str(name or "").replace("_", " "))


def _figure(value: object) -> str:
    return number(float(value)) if isinstance(value, int | float) else str(value)


@ui.page("/doctor/{name:path}")
def doctor_page(request: Request, name: str) -> None:
    with page(request, f"{name}, doctor", "Runs") as viewer:
        run = opened(viewer, name)
        if run is not None:
            run_heading(viewer, run, "Doctor")
            broken_lines(run)
            DoctorPage(viewer, run).build()
