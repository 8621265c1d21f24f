"""`mint runs [FOLDER]`: every run in a folder, a line each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mint.cli.failures import Code, Failure
from mint.cli.output import AsJson, figure, print_json, print_table, seconds
from mint.cli.rundirs import RUNS, begin_one

if TYPE_CHECKING:
    from mint.rl.summary import RunSummary


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder to look in, at any depth.")] = RUNS, as_json: AsJson = False
) -> None:
    """List the runs in a folder, the latest first."""
    from mint.rl.summary import find_runs, summarise

    if not folder.is_dir() and folder != RUNS:
        raise Failure(f"there is no folder {folder}.", "`mint runs` without one looks in ./runs.", Code.NOT_FOUND)
    found = [summarise(run) for run in find_runs(folder)]
    if as_json:
        return print_json([one.to_json() for one in found])
    if not found:
        typer.echo(f"No runs in {folder} yet. {begin_one()}")
        return
    columns = ("run", "state", "steps", "reward", "holdout", "alarms", "left", "written", "model")
    print_table(columns, map(_row, found), ("steps", "reward", "holdout", "alarms", "left"))
    for one in found:
        if one.note:
            typer.echo(f"{one.path}: {one.note}", err=True)


def _row(one: RunSummary) -> tuple[str, ...]:
    steps = f"{one.steps}/{one.total_steps}" if one.total_steps else str(one.steps)
    alarms = str(one.alarms) if one.alarms else ""
    age = f"{seconds(time.time() - one.written)} ago"
    left = seconds(one.seconds_left)
    return one.path, one.state, steps, figure(one.reward), figure(one.holdout), alarms, left, age, one.model or ""
