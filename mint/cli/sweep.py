"""`mint sweep RECIPE --over FIELD=A,B`: the same training with other settings and seeds, and a table of what came out.

Runs one after the other, each in a run directory of its own, so that everything that looks at runs looks at these too.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mint.cli.failures import Failure
from mint.cli.output import AsJson, figure, print_json, print_table
from mint.cli.train import complete_recipe, run_training

if TYPE_CHECKING:
    from mint.cli.sources import Resolved
    from mint.rl.summary import RunSummary

Choice = tuple[tuple[str, str], ...]
"""Fields and their values, as written."""


@dataclass(frozen=True)
class Outcome:
    """What the runs of one setting, with all its seeds, reached."""

    choice: Choice
    runs: tuple[RunSummary, ...]

    @property
    def figures(self) -> list[float]:
        """The holdout where there is one, else the reward of the last step."""
        return [value for run in self.runs if (value := _reached(run)) is not None]

    def to_json(self) -> dict[str, Any]:
        figures = self.figures
        return {
            **dict(self.choice),
            "mean": fmean(figures) if figures else None,
            "lowest": min(figures, default=None),
            "highest": max(figures, default=None),
            "runs": [run.to_json() for run in self.runs],
        }


def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE [--FIELD VALUE]...",
            help="As in `mint train`: a recipe, a .toml or a .py file, then fields that all runs have.",
            show_default=False,
            autocompletion=complete_recipe,
        ),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=A,B,...",
            help="Values of a field to try, with semicolons between them if a value has a comma in it. Repeat for "
            "several fields: every combination.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each combination, with seeds 0, 1, 2 ...")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the runs go.", show_default="sweeps/RECIPE")
    ] = None,
    preset: Annotated[list[str] | None, typer.Option(help="As in `mint train`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train by a recipe with every combination of settings. The same command goes on where it was stopped."""
    words = list(words or [])
    if not words or words[0].startswith("-"):
        raise Failure("which recipe?", "`mint sweep addition --over learning_rate=1e-4,1e-3 --seeds 2` is a start.")
    folder = out or Path("sweeps") / Path(words[0].partition(":")[0]).stem
    choices = _combinations(over or [])
    # All of them before the first run: a value that cannot be is told now, not tomorrow.
    planned = [[_resolved(words, preset or [], choice, n, folder) for n in range(seeds)] for choice in choices]
    outcomes = []
    for choice, runs in zip(choices, planned, strict=True):
        outcomes.append(Outcome(choice, tuple(_carried_out(one, as_json) for one in runs)))
    outcomes.sort(key=lambda one: -fmean(one.figures) if one.figures else float("inf"))
    if as_json:
        return print_json([one.to_json() for one in outcomes])
    _tell(outcomes, [field for field, _ in choices[0]], seeds)
    typer.echo(f"\nLook at them: mint runs {folder} · mint plot {folder} · mint dashboard {folder}")


def _combinations(over: Sequence[str]) -> list[Choice]:
    fields: dict[str, list[str]] = {}
    for given in over:
        name, equals, values = given.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        listed = [value.strip() for value in values.split(";" if ";" in values else ",")]
        if not name or not equals or "" in listed:
            raise Failure(f"--over {given!r} names no values.", "Write --over learning_rate=1e-4,3e-4.")
        if name in fields:
            raise Failure(f"--over names {name} twice.", "Put all its values behind one of them.")
        if len(set(listed)) < len(listed):
            raise Failure(f"--over {given!r} names a value twice.", "Repeat runs with --seeds.")
        if name in ("seed", "log_path"):
            raise Failure(f"--over {name}: every run has its own.", "How many seeds there are says --seeds.")
        fields[name] = listed
    return [tuple(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]


def _resolved(words: Sequence[str], presets: Sequence[str], choice: Choice, seed: int, folder: Path) -> Resolved:
    from mint.cli.sources import resolve

    settings = (*choice, ("seed", str(seed)))
    name = " ".join(f"{field}={value}" for field, value in settings).replace("/", "_")
    chosen = [word for field, value in settings for word in ("--" + field.replace("_", "-"), value)]
    return resolve(words[0], presets, [*words[1:], *chosen, "--log-path", str(folder / name)])


def _carried_out(resolved: Resolved, quiet: bool) -> RunSummary:
    from mint.rl.rundir import RunDir
    from mint.rl.summary import summarise

    path = resolved.config.log_path
    done = summarise(RunDir(path)) if (Path(path) / "config.json").is_file() else None
    if done is not None and done.state == "finished":
        return done
    if not quiet:
        typer.echo(f"\n{path}", err=True)
    return summarise(run_training(resolved.config, shlex.join(["mint", *sys.argv[1:]])))


def _tell(outcomes: Sequence[Outcome], fields: Sequence[str], seeds: int) -> None:
    columns = [*fields, "before", "after", *(["lowest", "highest"] if seeds > 1 else []), "steps", "warnings"]
    rows = []
    for one in outcomes:
        first = [run.first_holdout for run in one.runs if run.first_holdout is not None]
        reached = one.figures
        span = [figure(min(reached)), figure(max(reached))] if reached else ["", ""]
        rows.append([
            *(value for _, value in one.choice),
            figure(fmean(first)) if first else "",
            figure(fmean(reached)) if reached else "",
            *(span if seeds > 1 else []),
            sum(run.steps for run in one.runs),
            sum(run.warnings + run.alarms for run in one.runs),
        ])  # fmt: skip
    print_table(columns, rows, columns[len(fields) :])


def _reached(run: RunSummary) -> float | None:
    return run.holdout if run.holdout is not None else run.reward
