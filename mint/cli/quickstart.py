"""`mint quickstart`: a first run in a minute or two, and where to look next."""

from __future__ import annotations

import time
from typing import Annotated

import typer


def quickstart(
    steps: Annotated[int, typer.Option(min=1, help="Steps of reinforcement learning.")] = 20,
    folder: Annotated[str, typer.Option(help="Where the run directory is made.")] = "runs",
) -> None:
    """Watch the bundled model learn to add, with no GPU, no key and no network."""
    from dataclasses import replace

    from mint.cli.report import write_report
    from mint.cli.train import run_training, tell_result
    from mint.recipes.addition import CONFIG, AdditionDatasetBuilder

    log_path = f"{folder}/{time.strftime('quickstart-%Y%m%d-%H%M%S')}"
    typer.echo("mint/tiny makes plausible mistakes when it adds. A right answer earns 1, and that is all it is told.")
    builder = AdditionDatasetBuilder(num_batches=steps)
    config = replace(CONFIG, recipe_name="quickstart", dataset_builder=builder, log_path=log_path)
    run = run_training(config, f"mint train {log_path}")
    tell_result(run)
    typer.echo(f"A page to look at: {write_report(run)}")
    typer.echo(f"One group, token by token: mint show {log_path} --step 0 --group 0")
