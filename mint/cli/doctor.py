"""`mint doctor RUN`: why is it not learning?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def doctor(
    run: Annotated[Path, typer.Argument(help="Run directory (log_path of the run).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as a JSON list.")] = False,
) -> None:
    """Say what is wrong with a run, likeliest cause first. Exits with 1 if anything is alarming."""
    from mint.errors import MintError
    from mint.rl.doctor import diagnose

    try:
        findings = diagnose(run)
    except MintError as error:
        typer.echo(f"mint doctor: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps([finding.to_json() for finding in findings], indent=2))
    elif not findings:
        typer.echo(f"{run}: nothing to report.")
    else:
        typer.echo("\n\n".join("\n".join(finding.lines()) for finding in findings))
    if any(finding.severity == "alarm" for finding in findings):
        raise typer.Exit(1)
