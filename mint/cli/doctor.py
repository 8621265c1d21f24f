"""`mint doctor [RUN]`: why is it not learning?"""

from __future__ import annotations

import typer

from mint.cli.failures import Code
from mint.cli.output import AsJson, print_json, waiting
from mint.cli.rundirs import Run, open_run


def doctor(run: Run = None, as_json: AsJson = False) -> None:
    """Say what is wrong with a run, likeliest cause first. Exits with 1 if anything is alarming."""
    from mint.rl.doctor import diagnose

    run_dir = open_run(run)
    with waiting(f"reading {run_dir.path}"):
        findings = diagnose(run_dir)
    if as_json:
        print_json([finding.to_json() for finding in findings])
    elif not findings:
        typer.echo(f"{run_dir.path}: nothing to report.")
    else:
        typer.echo("\n\n".join("\n".join(finding.lines()) for finding in findings))
    if any(finding.severity == "alarm" for finding in findings):
        raise typer.Exit(Code.ALARM)
