"""`mint plot RUN...`: the curves of one or several runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are drawn on the same axes.")],
    out: Annotated[
        Path | None, typer.Option(help="Picture to write.", show_default="plot.png in the first run")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Draw only this metric. Repeat for several.")] = None,
) -> None:
    """Draw reward, signal, lengths, KL and the like over the steps."""
    from mint.errors import MintError
    from mint.rl.plots import plot_runs

    try:
        typer.echo(plot_runs(list(runs), out, metric or None))
    except MintError as error:
        typer.echo(f"mint plot: {error}", err=True)
        raise typer.Exit(2) from error
