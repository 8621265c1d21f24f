"""`mint bisect [RUN]`: the first bad checkpoint, in log2(n) evaluations."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from mint.cli.evaluate import REWARD, Recipe, with_checkpoints
from mint.cli.output import Address, AsJson, waiting
from mint.cli.rundirs import Run

if TYPE_CHECKING:
    from mint.rl.recheck import CheckpointEvaluator
    from mint.rl.rundir import CheckpointRecord


def bisect(
    run: Run = None,
    recipe: Recipe = None,
    metric: Annotated[str, typer.Option(help="What to judge checkpoints by.")] = REWARD,
    limit: Annotated[
        float | None, typer.Option(help="Worse than this is bad.", show_default="half way between first and last")
    ] = None,
    lower_is_better: Annotated[bool, typer.Option(help="For metrics such as a loss.")] = False,
    base_url: Address = None,
    as_json: AsJson = False,
) -> None:
    """Find the first bad checkpoint of a run with as few evaluations as possible."""
    from mint.rl.bisect import bisect as search

    async def work(evaluator: CheckpointEvaluator, records: list[CheckpointRecord]) -> None:
        async def measure(record: CheckpointRecord) -> float:
            with waiting(f"measuring {record.name}"):
                value = await evaluator.metric(record, metric)
            if not as_json:
                typer.echo(f"{record.name}  {metric} = {value:.4f}")
            return value

        verdict = await search(records, measure, limit, lower_is_better)
        good = verdict.last_good
        if as_json:
            names = {"first_bad": verdict.first_bad.name, "last_good": good.name if good else None}
            typer.echo(json.dumps(names | {"limit": verdict.limit, "measured": verdict.measured}))
        else:
            before = f"; {good.name} is still good: {good.state_path}" if good else ", and none before it is good"
            typer.echo(f"First bad checkpoint: {verdict.first_bad.name} (limit {verdict.limit:.4g}){before}")

    with_checkpoints(run, recipe, base_url, work)
