"""`mint advise RUN`: group and batch size from the pass rates a run has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def advise(run: Annotated[Path, typer.Argument(help="Run directory (log_path of the run).")]) -> None:
    """Advise a group size and a batch size, and count solved, learning and dead problems."""
    from mint.rl.adviser import advise as from_rates
    from mint.rl.ledger import STATES, Ledger
    from mint.rl.rundir import RunDir

    ledger = Ledger(RunDir(run))
    if not ledger.visits:
        typer.echo(f"mint advise: {run} has no ledger yet.", err=True)
        raise typer.Exit(2)
    counts = ledger.counts()
    typer.echo(f"{len(ledger.visits)} problems: " + ", ".join(f"{counts[state]} {state}" for state in STATES))
    typer.echo(from_rates(*ledger.measured_rates()))
