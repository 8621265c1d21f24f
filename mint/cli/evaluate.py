"""`mint eval RUN`: checkpoints measured again on the run's holdout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mint.rl.recheck import CheckpointEvaluator
    from mint.rl.rundir import CheckpointRecord

REWARD = "test/env/all/reward/total"

Run = Annotated[Path, typer.Argument(help="Run directory (log_path of the run).")]
Recipe = Annotated[
    str | None,
    typer.Option(
        help="Where the run's Config is: a Python file or module, and :NAME if it has several.",
        show_default="made again from config.json",
    ),
]
Address = Annotated[str | None, typer.Option(help="Server; by default the run's.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def evaluate(
    run: Run,
    recipe: Recipe = None,
    all_checkpoints: Annotated[bool, typer.Option(help="Every checkpoint, not only the last.")] = False,
    metric: Annotated[str, typer.Option(help="Metric to show; --json has all.")] = REWARD,
    base_url: Address = None,
    as_json: AsJson = False,
) -> None:
    """Measure a run's last checkpoint, or all of them, on its holdout."""

    async def work(evaluator: CheckpointEvaluator, records: list[CheckpointRecord]) -> None:
        for record in records if all_checkpoints else records[-1:]:
            metrics = await evaluator(record)
            if as_json:
                typer.echo(json.dumps({"checkpoint": record.name, "step": record.batch, **metrics}))
            else:
                typer.echo(f"{record.name}  {metric} = {metrics.get(metric, float('nan')):.4f}")

    with_checkpoints("eval", run, recipe, base_url, work)


def with_checkpoints(
    verb: str,
    run: Path,
    recipe: str | None,
    base_url: str | None,
    work: Callable[[CheckpointEvaluator, list[CheckpointRecord]], Awaitable[None]],
) -> None:
    """Runs `work` on a run's checkpoints, with what evaluates them."""
    import mint
    from mint.errors import MintError
    from mint.rl.recheck import CheckpointEvaluator, find_checkpoints, load_config
    from mint.rl.rundir import RunDir

    async def go() -> None:
        run_dir = RunDir(run)
        config = load_config(run_dir, recipe)
        service = mint.ServiceClient(base_url or config.base_url)
        try:
            await work(CheckpointEvaluator(config, service), find_checkpoints(run_dir))
        finally:
            await service.close()

    try:
        asyncio.run(go())
    except MintError as error:
        typer.echo(f"mint {verb}: {error}", err=True)
        raise typer.Exit(2) from error
