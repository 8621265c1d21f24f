"""`mint eval [RUN]`: checkpoints measured again on the run's holdout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mint.cli.failures import Failure
from mint.cli.output import Address, AsJson, counted
from mint.cli.rundirs import Run, open_run

if TYPE_CHECKING:
    from mint.rl.recheck import CheckpointEvaluator
    from mint.rl.rundir import CheckpointRecord

REWARD = "test/env/all/reward/total"

Recipe = Annotated[
    str | None,
    typer.Option(
        help="Where the run's Config is: a Python file or module, and :NAME if it has several.",
        show_default="made again from config.json",
    ),
]


def evaluate(
    run: Run = None,
    recipe: Recipe = None,
    all_checkpoints: Annotated[bool, typer.Option(help="Every checkpoint, not only the last.")] = False,
    metric: Annotated[str, typer.Option(help="Metric to show; --json has all.")] = REWARD,
    base_url: Address = None,
    as_json: AsJson = False,
) -> None:
    """Measure a run's last checkpoint, or all of them, on its holdout. --json prints one object a line."""

    async def work(evaluator: CheckpointEvaluator, records: list[CheckpointRecord]) -> None:
        chosen = records if all_checkpoints else records[-1:]
        for record in counted(chosen, "checkpoints", len(chosen)):
            metrics = await evaluator(record)
            if as_json:
                typer.echo(json.dumps({"checkpoint": record.name, "step": record.batch, **metrics}))
            elif metric not in metrics:
                there = ", ".join(sorted(metrics))
                raise Failure(f"the evaluation has no metric {metric!r}.", f"There are {there}.")
            else:
                typer.echo(f"{record.name}  {metric} = {metrics[metric]:.4f}")

    with_checkpoints(run, recipe, base_url, work)


def with_checkpoints(
    run: Path | None,
    recipe: str | None,
    base_url: str | None,
    work: Callable[[CheckpointEvaluator, list[CheckpointRecord]], Awaitable[None]],
) -> None:
    """Runs `work` on a run's checkpoints, with what evaluates them."""
    import mint
    from mint.rl.recheck import CheckpointEvaluator, find_checkpoints, load_config

    async def go() -> None:
        run_dir = open_run(run)
        config = load_config(run_dir, recipe)
        records = find_checkpoints(run_dir)
        service = mint.ServiceClient(base_url or config.base_url)
        try:
            await work(CheckpointEvaluator(config, service), records)
        finally:
            await service.close()

    asyncio.run(go())
