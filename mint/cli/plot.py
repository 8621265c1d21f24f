"""`mint plot RUN...`: the curves of one or several runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mint.cli.output import waiting
from mint.cli.rundirs import complete_run, open_run


def plot(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run directories; several are drawn on the same axes.",
            show_default="the latest in ./runs",
            autocompletion=complete_run,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Picture to write.", show_default="plot.png in the first run")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Draw only this metric. Repeat for several.")] = None,
) -> None:
    """Draw reward, signal, lengths, KL and the like over the steps."""
    from mint.rl.plots import plot_runs

    paths = [open_run(run).path for run in runs] if runs else [open_run(None).path]
    with waiting("drawing"):
        picture = plot_runs(paths, out, metric or None)
    typer.echo(picture)
