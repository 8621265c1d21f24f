"""Step to group to rollout to token. What is shown of a token is decided here, how it looks in static/rollouts.js."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from nicegui import events, ui
from nicegui.element import Element

from mint.dashboard.data import Run
from mint.dashboard.frame import STATIC, banner, broken_lines, empty, go, page, run_heading, run_link
from mint.dashboard.index import Group, Head, StepIndex
from mint.dashboard.opening import opened
from mint.dashboard.site import Viewer
from mint.dashboard.theme import number, preview
from mint.rl.rundir import RolloutRecord

MOST_SAMPLES = 32
"""Of one group side by side; of larger ones the best and the worst half."""
DIGITS = 6
"""Of a per-token figure that is sent to the browser."""


class RolloutView(Element, component=STATIC / "rollouts.js"):
    """Groups, and one of them token by token."""


class StepPage:
    """One step of a run on one screen, or an evaluation."""

    def __init__(self, viewer: Viewer, run: Run, evaluator: str | None, step: int) -> None:
        self.viewer, self.run, self.evaluator, self.step = viewer, run, evaluator, step
        self.query = ""
        self.group: int | None = None
        self.index: StepIndex | None = None
        self.steps = run.rollouts.steps(evaluator)

    def build(self, group: int | None, member: int | None, problem: str | None) -> None:
        self._bar()
        self.index = self.run.rollouts.step(self.step, self.evaluator)
        if self.index is None or not self.index.groups:
            self._nothing()
            return
        if self.index.broken:
            banner("warning", f"{self.index.broken} lines of {self.index.file} are not rollouts and were left out.")
        rewards = [head.reward for head in self.index.members]
        self.view = RolloutView()
        self.view._props |= {"low": min(0.0, *rewards), "high": max(1.0, *rewards), "query": ""}
        self.view.on("open", self._opened)
        self.view.on("search", self._searched)
        self.view.on("go", lambda event: self._go(event.args["by"]))
        self._fill()
        self._show(self._chosen(group, problem), member)

    # ------------------------------------------------------------------------------------------------ parts

    def _bar(self) -> None:
        """Which step, and the way to its neighbours."""
        with ui.element("div").classes("flow"):
            for by, text, tip in ((-1, "◂", "Previous step ([)"), (1, "▸", "Next step (])")):
                with ui.element("button").classes("plain").on("click", lambda _, by=by: self._go(by)):
                    ui.label(text)
                    ui.tooltip(tip)
            word = "Step" if self.evaluator is None else f"Evaluation “{self.evaluator}” of policy"
            ui.label(f"{word} {self.step}").style("font-weight: 650; font-size: 16px")
            if self.steps:
                box = ui.number(value=self.step, min=self.steps[0], max=self.steps[-1], step=1, format="%d")
                box.props("dense outlined hide-bottom-space").style("width: 92px")
                box.on("keydown.enter", lambda: self._open_step(int(box.value or 0)))
                with box:
                    ui.tooltip("Go to a step: type its number, then Enter")
                ui.label(f"of {self.steps[0]} to {self.steps[-1]}").classes("faint")
            self._figures()
            ui.element("div").classes("grow")
            evaluators: list[str | None] = [None, *self.run.rollouts.evaluators()]
            for name in evaluators:
                text = "Training" if name is None else f"Evaluation: {name}"
                target = run_link(self.viewer, self.run, "step", evaluation=name)
                ui.link(text, target).classes("chip good" if name == self.evaluator else "chip")

    def _figures(self) -> None:
        if self.evaluator is not None:
            return
        for name, metric in (("reward", "env/all/reward/total"), ("with signal", "env/all/by_group/frac_mixed")):
            series = self.run.series(metric)
            if self.step in series.steps:
                ui.label(f"{name} {number(series.values[series.steps.index(self.step)])}").classes("chip")
        for alarm in self.run.alarms:
            if alarm.step == self.step:
                ui.link(f"{alarm.severity}: {alarm.kind}", run_link(self.viewer, self.run, "doctor")).classes(
                    f"chip {alarm.severity}"
                )

    def _nothing(self) -> None:
        if not self.steps:
            empty(
                "No rollouts yet",
                [
                    "The loop writes them to the folder rollouts/ at the end of every step. A run that has just "
                    "started has none, and loops written by hand have none unless they write them.",
                    "Reload this page when the first step is done.",
                ],
            )
            return
        last = self.steps[-1]
        empty(f"Nothing was written for step {self.step}", [f"There are rollouts of steps {self.steps[0]} to {last}."])
        ui.link(f"Open step {last}", run_link(self.viewer, self.run, "step", step=last)).classes("plain")

    # ------------------------------------------------------------------------------------------------ what happens

    def _chosen(self, group: int | None, problem: str | None) -> int:
        assert self.index is not None
        groups = self.index.groups
        if group in groups:
            return group
        named = [number for number, some in groups.items() if problem is not None and some.problem == problem]
        return named[0] if named else next(iter(groups))

    def _fill(self) -> None:
        assert self.index is not None
        shown = [group for group in self.index.groups.values() if holds(group, self.query)]
        self.view._props["groups"] = [summary(group) for group in shown]
        self.view._props["query"] = self.query

    def _show(self, number: int, member: int | None = None) -> None:
        assert self.index is not None
        self.group = number
        self.view._props["group"] = self._detail(self.index.groups[number], member)
        self.view.update()
        target = run_link(
            self.viewer, self.run, "step", step=self.step, group=number, member=member, evaluation=self.evaluator
        )
        ui.run_javascript(f"history.replaceState(null, '', {json.dumps(target)})")

    def _detail(self, group: Group, member: int | None) -> dict[str, Any]:
        assert self.index is not None
        heads = fitting(group.members)
        records = [self.index.record(head) for head in heads]
        selected = next((k for k, head in enumerate(heads) if head.member == member), 0)
        link = run_link(self.viewer, self.run, "ledger", problem=group.problem) if group.problem else None
        return {
            "n": group.number,
            "step": self.step,
            "prompt": group.prompt,
            "prompt_tokens": len(records[0].prompt_tokens),
            "mean": group.mean,
            "version": heads[0].policy_version,
            "temperature": heads[0].temperature,
            "problem_link": link if self.evaluator is None else None,
            "omitted": len(group.members) - len(heads),
            "selected": selected,
            "samples": [sample(head, record) for head, record in zip(heads, records, strict=True)],
        }

    def _opened(self, event: events.GenericEventArguments) -> None:
        assert self.index is not None
        number = int(event.args["group"])
        if number in self.index.groups:
            self._show(number)

    def _searched(self, event: events.GenericEventArguments) -> None:
        self.query = str(event.args["query"])[:200]
        self._fill()
        self.view.update()

    def _go(self, by: int) -> None:
        later = [step for step in self.steps if (step - self.step) * by > 0]
        if later:
            self._open_step(min(later) if by > 0 else max(later))
        else:
            ui.notify("This is the last step." if by > 0 else "This is the first step.")

    def _open_step(self, step: int) -> None:
        go(self.viewer, run_link(self.viewer, self.run, "step", step=step, evaluation=self.evaluator))


def holds(group: Group, query: str) -> bool:
    wanted = query.lower()
    return wanted in group.prompt.lower() or any(wanted in head.completion.lower() for head in group.members)


def summary(group: Group) -> dict[str, Any]:
    return {"n": group.number, "prompt": preview(group.prompt, 120), "rewards": group.rewards, "mean": group.mean}


def fitting(members: tuple[Head, ...]) -> tuple[Head, ...]:
    if len(members) <= MOST_SAMPLES:
        return members
    half = MOST_SAMPLES // 2
    return members[:half] + members[-half:]


def sample(head: Head, record: RolloutRecord) -> dict[str, Any]:
    """A rollout as the browser gets it."""
    logs = record.turns[-1].logs if record.turns else {}
    return {
        "member": head.member,
        "reward": head.reward,
        "advantage": head.advantage,
        "tokens": head.tokens,
        "stop": head.stop_reason,
        "trained": head.trained,
        "terms": sorted(head.terms.items(), key=lambda term: (not term[1], term[0])),
        "answer": str(logs["reference"]) if "reference" in logs else None,
        "calls": [call_text(call) for call in calls_of(logs)],
        "pieces": record.completion_pieces or [str(token) for token in record.completion_tokens],
        "ids": record.completion_tokens,
        "mask": record.mask,
        "logprobs": rounded(record.logprobs),
        "train": rounded(record.train_logprobs),
        "reference": rounded(record.reference_logprobs),
        "advantages": rounded(record.advantages),
        "turns": [[turn.start, turn.end] for turn in record.turns],
    }


def rounded(values: list[float] | None) -> list[float] | None:
    return None if values is None else [float(f"{value:.{DIGITS}g}") for value in values]


def calls_of(logs: dict[str, Any]) -> list[dict[str, Any]]:
    """Tool calls, which an environment logs as JSON text."""
    told = logs.get("tool_calls")
    try:
        calls = json.loads(told) if isinstance(told, str) else told
    except ValueError:
        return []
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def call_text(call: dict[str, Any]) -> str:
    given = call.get("arguments")
    arguments = ", ".join(f"{k}={v!r}" for k, v in given.items()) if isinstance(given, dict) else str(given)
    return f"{call.get('name')}({arguments}) → {call.get('result')}"


@ui.page("/step/{name:path}")
def step_page(
    request: Request,
    name: str,
    step: int | None = None,
    group: int | None = None,
    member: int | None = None,
    problem: str | None = None,
    evaluation: str | None = None,
) -> None:
    with page(request, f"{name}, rollouts", "Runs") as viewer:
        run = opened(viewer, name)
        if run is None:
            return
        run_heading(viewer, run, "Rollouts")
        broken_lines(run)
        steps = run.rollouts.steps(evaluation)
        at = step if step is not None else steps[-1] if steps else 0
        StepPage(viewer, run, evaluation, at).build(group, member, problem)
