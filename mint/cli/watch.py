"""`mint watch [RUN]`: the live table of a run that another process is carrying out."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from mint.cli.rundirs import Run, open_run


def watch(
    run: Run = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 0.5,
    once: Annotated[bool, typer.Option(help="Show what there is and end.")] = False,
) -> None:
    """Follow a run until it ends; Ctrl-C stops looking, not the run."""
    from mint.rl.loggers import ConsoleLogger, RunInfo
    from mint.rl.rundir import read_jsonl
    from mint.rl.summary import summarise

    run_dir = open_run(run)
    now = summarise(run_dir)
    if now.state == "starting":
        typer.echo(f"{run_dir.path} is starting; it has not written a step yet.", err=True)
    logger = ConsoleLogger(RunInfo(run_dir, now.total_steps or 0, name=run_dir.path.name))
    seen = told = 0
    try:
        while True:
            lines, findings = run_dir.metrics(), read_jsonl(run_dir.health_file)
            now = summarise(run_dir)
            logger.total = now.total_steps or 0
            logger.progress.update(logger.task, total=now.total_steps)
            for line in lines[seen:]:
                logger.log(line["step"], line)
            for finding in findings[told:]:
                if "kind" in finding:
                    logger.say(f"{finding['severity'].upper()} {finding['kind']}: {finding['sentence']}")
            seen, told = len(lines), len(findings)
            if once or now.state in ("finished", "stopped", "broken"):
                break
            time.sleep(every)
    finally:
        logger.close()
    if now.state == "stopped":
        typer.echo(f"{run_dir.path} stopped after {now.steps} steps. To go on: mint train {run_dir.path}", err=True)
