"""The parts of a report beside curves and samples: head, findings, ledger, settings, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from mint.rl.doctor import Finding
from mint.rl.ledger import STATES, Ledger
from mint.rl.rundir import RunDir
from mint.rl.summary import RunSummary

SHOWN_PROBLEMS = 12
LONGEST_PROMPT = 90


def section(title: str, body: str, name: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def tiles(one: RunSummary) -> str:
    """The few figures one looks for first."""
    steps = f"{one.steps} / {one.total_steps}" if one.total_steps else str(one.steps)
    holdout = "not measured" if one.holdout is None else f"{_figure(one.first_holdout)} → {_figure(one.holdout)}"
    worries = f"{one.alarms} alarms, {one.warnings} warnings" if one.alarms or one.warnings else "none"
    written = datetime.fromtimestamp(one.written, UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = {
        "state": one.state,
        "steps": steps,
        "reward, last step": _figure(one.reward),
        "holdout reward": holdout,
        "findings during the run": worries,
        "model": one.model or "unknown",
        "last written": written,
    }
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="tiles">{cells}</dl>'


def findings(found: Sequence[Finding]) -> str:
    if not found:
        return "<p>The doctor has nothing to report.</p>"
    return "".join(map(_finding, found))


def _finding(finding: Finding) -> str:
    first, last = finding.steps
    where = f"step {first}" if first == last else f"steps {first} to {last}"
    figures = "".join(
        f"<span>{escape(name)} <b>{escape(value if isinstance(value, str) else f'{value:.4g}')}</b></span>"
        for name, value in finding.evidence.items()
    )
    shown = "".join(_evidence(sample) for sample in finding.samples)
    cause = f"<p>Follows from <b>{escape(finding.follows_from)}</b>.</p>" if finding.follows_from else ""
    return (
        f'<article class="finding {finding.severity}"><header><b>{escape(finding.severity)}</b> '
        f"{escape(finding.kind.replace('_', ' '))} <small>{where}</small></header><p>{escape(finding.sentence)}</p>"
        f'{cause}<p class="figures">{figures}</p>{shown}<p class="remedy">{escape(finding.remedy)}</p></article>'
    )


def _evidence(sample: dict[str, Any]) -> str:
    reference = sample.get("reference")
    wanted = "" if reference is None else f" <small>the reference is {escape(repr(reference))}</small>"
    return (
        f'<pre class="evidence"><small>step {sample["step"]}, group {sample["group"]}, member {sample["member"]}, '
        f"reward {sample['reward']:.3g}</small>\n{escape(str(sample['prompt']))}<b>{escape(str(sample['completion']))}"
        f"</b>{wanted}</pre>"
    )


def ledger(run: RunDir) -> str:
    """How many problems are solved, learned, dead, and those that give most to think about."""
    book = Ledger(run)
    if not book.visits:
        return ""
    counts = book.counts()
    total = sum(counts.values()) or 1
    bar = "".join(
        f'<span class="{state}" style="flex:{max(counts[state], 0.001):g}" title="{counts[state]} {state}"></span>'
        for state in STATES
    )
    told = ", ".join(f"{counts[state]} {state} ({counts[state] / total:.0%})" for state in STATES)
    hardest = sorted(book.visits, key=lambda name: (book.visits[name][-1].rate, -len(book.visits[name])))
    rows = [
        (_prompt(run, name, visits[-1].step), len(visits), " → ".join(f"{visit.rate:.0%}" for visit in visits[-5:]))
        for name, visits in ((name, book.visits[name]) for name in hardest[:SHOWN_PROBLEMS])
    ]
    listed = table(("hardest problems", "visits", "pass rate, latest last"), rows)
    return f'<p>{len(book.visits)} problems: {told}.</p><div class="bar">{bar}</div>{listed}'


def _prompt(run: RunDir, problem: str, step: int) -> str:
    """What the problem asks, from a rollout of it; its name where none was kept."""
    said = next((record.prompt_text for record in run.rollouts(step) if record.problem == problem), problem)
    text = " ".join(said.split())
    return text if len(text) <= LONGEST_PROMPT else "…" + text[-LONGEST_PROMPT:]


def settings(run: RunDir) -> str:
    config = run.config() or {}
    rows = [(name, json.dumps(value, default=str)) for name, value in config.items()]
    code = run.diff_file.read_text(errors="replace").partition("\n")[0] if run.diff_file.is_file() else ""
    note = f"<p>Code: {escape(code.removeprefix('# '))}</p>" if code else ""
    return f"<details><summary>{len(rows)} settings</summary>{table(('field', 'value'), rows)}</details>{note}"


def checkpoints(run: RunDir) -> str:
    records = run.checkpoints()
    rows = [(r.name, r.batch, r.state_path, r.sampler_path or "", "final" if r.final else "") for r in records]
    return table(("name", "steps", "to train on", "to sample from", ""), rows) if rows else ""


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
