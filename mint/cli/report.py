"""`mint report [RUN]`: one HTML file about a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mint.cli.output import waiting
from mint.cli.rundirs import Run, open_run

if TYPE_CHECKING:
    from mint.rl.rundir import RunDir


def report(
    run: Run = None,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="report.html in the run")] = None,
    step: Annotated[
        list[int] | None,
        typer.Option(help="Steps to show samples of. Repeat.", show_default="first, middle and last"),
    ] = None,
) -> None:
    """Write curves, settings, the doctor's findings and samples into one file that needs no network."""
    typer.echo(write_report(open_run(run), out, step))


def write_report(run: RunDir, out: Path | None = None, steps: list[int] | None = None) -> Path:
    from mint.rl.report import report_page

    target = out or run.path / "report.html"
    with waiting(f"writing {target}"):
        page = report_page(run, steps)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page)
    return target
