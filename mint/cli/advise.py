"""`mint advise [RUN]`: group and batch size from the pass rates a run has measured."""

from __future__ import annotations

import typer

from mint.cli.failures import Failure
from mint.cli.output import AsJson, print_json
from mint.cli.rundirs import Run, open_run


def advise(run: Run = None, as_json: AsJson = False) -> None:
    """Advise a group size and a batch size, and count solved, learning and dead problems."""
    from mint.rl.adviser import advise as from_rates
    from mint.rl.ledger import STATES, Ledger

    run_dir = open_run(run)
    ledger = Ledger(run_dir)
    if not ledger.visits:
        raise Failure(f"{run_dir.path} has no ledger yet.", "The first step writes it; `mint watch` follows.")
    counts, advice = ledger.counts(), from_rates(*ledger.measured_rates())
    if as_json:
        return print_json({"problems": {state: counts[state] for state in STATES}} | vars(advice))
    typer.echo(f"{len(ledger.visits)} problems: " + ", ".join(f"{counts[state]} {state}" for state in STATES))
    typer.echo(advice)
