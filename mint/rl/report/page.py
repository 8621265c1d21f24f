"""The whole page, from a run directory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mint.errors import BadRequest
from mint.rl.doctor import diagnose
from mint.rl.report.charts import Mark, charts
from mint.rl.report.samples import samples
from mint.rl.report.sections import checkpoints, findings, ledger, section, settings, tiles
from mint.rl.report.style import STYLE
from mint.rl.rundir import RunDir, read_jsonl
from mint.rl.summary import summarise

SCALE = (
    '<p class="scale">Tokens: <span style="background:rgba(var(--up),.5)">positive</span> and '
    '<span style="background:rgba(var(--down),.5)">negative</span> advantage, the deeper the larger. '
    "Hover a token for its figures. What the environment said is in italics.</p>"
)


def report_page(run: RunDir, steps: Sequence[int] | None = None) -> str:
    """`steps`: whose samples to show; by default the first, the middle and the last."""
    one = summarise(run)
    if one.note:
        raise BadRequest(one.note)
    lines = run.metrics()
    shown = samples(run, steps)
    if steps and not shown:
        there = run.rollout_steps()
        known = f"{there[0]} to {there[-1]}" if there else "none"
        raise BadRequest(f"no rollouts of step {', '.join(map(str, steps))} were written; there are {known}.")
    parts = {
        "Curves": ("curves", charts(lines, _marks(run)) if lines else "<p>No step has been written yet.</p>"),
        "What the doctor says": ("doctor", findings(diagnose(run))),
        "Samples": ("samples", SCALE + shown if shown else ""),
        "Problems": ("problems", ledger(run)),
        "Checkpoints": ("checkpoints", checkpoints(run)),
        "Settings": ("settings", settings(run)),
    }
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for title, (name, body) in parts.items() if body)
    title = escape(run.path.resolve().name)
    subtitle = f"{one.recipe or 'a run'} on {one.model or 'an unknown model'}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1><p>{escape(subtitle)}</p>"
        f"{tiles(one)}<nav>{links}</nav>"
        + "".join(section(heading, body, name) for heading, (name, body) in parts.items())
        + "</body></html>\n"
    )


def _marks(run: RunDir) -> list[Mark]:
    told = [line for line in read_jsonl(run.health_file) if line.get("severity") in ("alarm", "warning")]
    worries = [Mark(line["step"], line["severity"], f"{line['kind']}: {line['sentence']}") for line in told]
    saves = [Mark(record.batch, "checkpoint", f"checkpoint {record.name}") for record in run.checkpoints()]
    return [*saves, *worries]
