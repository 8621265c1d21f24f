"""Runs as people name them: a path, a name in ./runs, or nothing for the latest."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mint.cli.failures import Code, Failure

if TYPE_CHECKING:
    from mint.rl.rundir import RunDir

RUNS = Path("runs")


def complete_run(incomplete: str) -> list[str]:
    """Paths of runs below ./runs, for the shell."""
    folders = sorted(file.parent for file in RUNS.glob("*/config.json"))
    return [
        str(folder) for folder in folders if str(folder).startswith(incomplete) or folder.name.startswith(incomplete)
    ]


Run = Annotated[
    Path | None,
    typer.Argument(
        help="Run directory, or its name in ./runs.", show_default="the latest in ./runs", autocompletion=complete_run
    ),
]


def open_run(named: Path | None) -> RunDir:
    """The run somebody means; if there is none, what there is instead."""
    from mint.rl.rundir import RunDir
    from mint.rl.summary import find_runs

    if named is None:
        latest = next(iter(find_runs(RUNS)), None)
        if latest is None:
            raise Failure("there are no runs in ./runs yet.", begin_one(), Code.NOT_FOUND)
        return latest
    named = named.expanduser()
    for path in (named, RUNS / named):
        if (path / "config.json").is_file():
            return RunDir(path)
    if named.is_dir():
        inside = [run.path for run in find_runs(named)]
        if inside:
            shown = ", ".join(map(str, inside[:3])) + (", ..." if len(inside) > 3 else "")
            raise Failure(f"{named} holds {len(inside)} runs; name one of them.", f"There are {shown}.", Code.NOT_FOUND)
        raise Failure(f"{named} is not a run directory: it has no config.json.", begin_one(), Code.NOT_FOUND)
    names = [run.path.name for run in find_runs(RUNS)]
    near = difflib.get_close_matches(named.name, names, 1)
    there = f"did you mean {RUNS / near[0]}?" if near else f"in ./runs there are {', '.join(names[:5]) or 'none'}."
    raise Failure(f"there is no run {named}; {there}", "`mint runs FOLDER` lists the runs in a folder.", Code.NOT_FOUND)


def begin_one() -> str:
    return "Start one with `mint quickstart` or `mint train addition`; `mint runs FOLDER` looks elsewhere."
