"""`mint train RECIPE`: one run from a recipe, a TOML file or a Python file, every field an option."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mint.cli.failures import Code, Failure
from mint.cli.output import AsJson, figure, print_json, print_table, seconds, waiting

if TYPE_CHECKING:
    from mint.cli.sources import Resolved
    from mint.rl.config import Config
    from mint.rl.rundir import RunDir


def complete_recipe(incomplete: str) -> list[str]:
    from mint.recipes import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE [--FIELD VALUE]...",
            help="A recipe's name (--list), a .toml file, a .py file with a Config, or a run directory to go on with; "
            "then any field (--fields), such as --learning-rate 1e-4 --group-size 8.",
            show_default=False,
            autocompletion=complete_recipe,
        ),
    ] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="Settings by name: starting_point, grpo, dapo ... Repeat for several.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Show the settings and what the run would cost, measured by four pilot steps.")
    ] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes and presets.")] = False,
    list_fields: Annotated[bool, typer.Option("--fields", help="List every field that can be set.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train by a recipe. The same command goes on with a run that was stopped, killed or interrupted with Ctrl-C."""
    words = list(words or [])
    if list_recipes:
        return _list_recipes(as_json)
    if list_fields:
        return _list_fields(as_json)
    if not words or words[0].startswith("-"):
        said = f"{words[0]!r} stands where the recipe belongs." if words else "which recipe?"
        raise Failure(said, "`mint train addition` is a start; `mint train --list` lists them all.")
    from mint.cli.sources import resolve

    resolved = resolve(words[0], preset or [], words[1:])
    if dry_run:
        return _estimate(resolved, as_json)
    run = run_training(resolved.config, "mint train " + " ".join(_quoted(sys.argv[2:])))
    if as_json:
        from mint.rl.summary import summarise

        print_json(summarise(run).to_json())
    else:
        tell_result(run)


def run_training(config: Config, command: str) -> RunDir:
    """Trains to the end. Ctrl-C saves, says how to go on with `command`, and ends with 130."""
    from mint.rl.rundir import RunDir
    from mint.rl.train import train as run

    try:
        with _warnings_shown():
            return run(config)
    except KeyboardInterrupt:
        last = RunDir(config.log_path).last_checkpoint()
        if last is None:
            said, then = "Stopped before the first step was done; nothing was saved.", "To start again"
        else:
            said, then = f"Stopped after step {last.batch}; everything up to there is saved.", "To go on"
        print(f"{said}\n{then}: {command}", file=sys.stderr)
        raise typer.Exit(Code.INTERRUPTED) from None


def tell_result(run: RunDir) -> None:
    from mint.rl.summary import summarise

    one = summarise(run)
    last = run.last_checkpoint()
    typer.echo(f"\n{run.path}: {one.steps} steps, reward {figure(one.reward)}", nl=False)
    holdout = f", holdout {figure(one.first_holdout)} → {figure(one.holdout)}" if one.holdout is not None else ""
    typer.echo(holdout)
    if last is not None:
        typer.echo(f"Checkpoint: {last.sampler_path or last.state_path}")
    typer.echo(f"Look at it: mint show {run.path} · mint doctor {run.path} · mint report {run.path}")


# --------------------------------------------------------------------------------------------------------------------


def _estimate(resolved: Resolved, as_json: bool) -> None:
    import asyncio

    import mint
    from mint.errors import BadRequest
    from mint.rl.preview import Preview, preview

    async def pilot() -> Preview:
        service = mint.ServiceClient(resolved.config.base_url)
        try:
            return await preview(resolved.config, service)
        finally:
            await service.close()

    config = resolved.config.to_json()
    flat = {name: value for name, value in config.items() if name != "dataset_builder"}
    flat |= {f"dataset_builder.{name}": value for name, value in config["dataset_builder"].items()}
    if not as_json:
        rows = [(name, _short(value), _decided(resolved, name)) for name, value in flat.items()]
        print_table(("field", "value", "from"), rows)
    estimate: Preview | None = None
    note = ""
    try:
        with waiting("four pilot steps, to see what the run costs"):
            estimate = asyncio.run(pilot())
    except BadRequest as error:
        note = str(error)
    if as_json:
        print_json({"config": config, "estimate": vars(estimate) if estimate else None, "note": note})
    elif estimate is None:
        typer.echo(f"\nNo estimate: {note}")
    else:
        typer.echo(f"\nEstimate, {seconds(estimate.seconds)} in all: {estimate} Nothing of it was kept.")


def _decided(resolved: Resolved, name: str) -> str:
    from dataclasses import MISSING, fields

    defaults = {f.name: f.default for f in fields(resolved.config) if f.default is not MISSING}
    who = resolved.decided.get(name, "")
    untouched = name in defaults and getattr(resolved.config, name, None) == defaults[name]
    return "default" if untouched and who not in ("option",) and not who.startswith("preset") else who


def _list_recipes(as_json: bool) -> None:
    from mint.recipes import RECIPES
    from mint.recipes.presets import PRESETS

    if as_json:
        recipes = [{"name": name, "summary": one.summary, "reward": one.reward} for name, one in RECIPES.items()]
        return print_json({"recipes": recipes, "presets": list(PRESETS)})
    print_table(("recipe", "task", "what earns a point"), [(n, r.summary, r.reward) for n, r in RECIPES.items()])
    typer.echo(f"\nPresets (--preset NAME, over any recipe): {', '.join(PRESETS)}")


def _list_fields(as_json: bool) -> None:
    from mint.cli.fields import documented_fields
    from mint.recipes.tasks import TaskBuilder
    from mint.rl.config import Config

    every = [*documented_fields(Config), *documented_fields(TaskBuilder)]
    if as_json:
        return print_json([vars(one) for one in every])
    rows = [("--" + one.name.replace("_", "-"), one.kind, _short(one.default), one.meaning) for one in every]
    print_table(("field", "takes", "default", "meaning"), rows)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _quoted(words: list[str]) -> list[str]:
    import shlex

    return [shlex.quote(word) for word in words]


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """The library logs to the run's logs.log; whoever sits before the terminal should read its warnings too."""

    class ToStderr(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(record.getMessage(), file=sys.stderr)  # looked up now: the live table puts its own there

    handler = ToStderr(logging.WARNING)
    logging.getLogger("mint").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("mint").removeHandler(handler)
