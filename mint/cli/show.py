"""`mint show [RUN]`: a run, then a step of it, a group, a single answer token by token."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mint.cli.failures import Code, Failure
from mint.cli.output import AsJson, figure, print_json, print_table, seconds
from mint.cli.output import show as put
from mint.cli.rundirs import Run, open_run

if TYPE_CHECKING:
    from rich.text import Text

    from mint.rl.rundir import RolloutRecord, RunDir


def show(
    run: Run = None,
    step: Annotated[int | None, typer.Option(min=0, help="The groups of this step.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="The answers of this group; needs --step.")] = None,
    member: Annotated[int | None, typer.Option(min=0, help="One answer, token by token; needs --group.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show where a run stands and what it says; --step, --group and --member go closer."""
    run_dir = open_run(run)
    if (group is not None and step is None) or (member is not None and group is None):
        raise Failure("a group is in a step, and a member in a group.", "Give --step, then --group, then --member.")
    if step is None:
        return _run(run_dir, as_json)
    records = _records(run_dir, step, group, member)
    if as_json:
        return print_json([vars(record) | {"turns": [vars(turn) for turn in record.turns]} for record in records])
    if member is not None:
        return _tokens(records[0])
    if group is not None:
        return _answers(records)
    _groups(records)
    typer.echo(f"\nCloser: mint show {run_dir.path} --step {step} --group {records[0].group}")


def _records(run: RunDir, step: int, group: int | None, member: int | None) -> list[RolloutRecord]:
    steps = run.rollout_steps()
    if step not in steps:
        there = f"there are {steps[0]} to {steps[-1]}" if steps else "none were written (rollout_json_export)"
        raise Failure(f"{run.path} has no rollouts of step {step}; {there}.", "Choose another --step.", Code.NOT_FOUND)
    records = run.rollouts(step)
    for name, value in (("group", group), ("member", member)):
        found = [record for record in records if value is None or getattr(record, name) == value]
        if not found:
            known = sorted({getattr(record, name) for record in records})
            raise Failure(
                f"step {step} has no {name} {value}; there are {', '.join(map(str, known))}.",
                f"Choose another --{name}.",
                Code.NOT_FOUND,
            )
        records = found
    return records


def _run(run: RunDir, as_json: bool) -> None:
    from mint.rl.loggers import CONSOLE_COLUMNS, console_row
    from mint.rl.summary import summarise

    one = summarise(run)
    if as_json:
        return print_json(one.to_json() | {"config": run.config(), "last": next(reversed(run.metrics()), None)})
    if one.note:
        raise Failure(one.note, "The other files of the run are untouched; `mint runs` lists it as broken.")
    steps = f"{one.steps} of {one.total_steps} steps" if one.total_steps else f"{one.steps} steps"
    left = f", {seconds(one.seconds_left)} left" if one.seconds_left else ""
    typer.echo(f"{run.path}  {one.state}, {steps}{left}  {one.model or ''}")
    lines = run.metrics()
    if not lines:
        typer.echo("It has not written a step yet; `mint watch` follows it.")
        return
    headings = ("step", *(heading for heading, _, _ in CONSOLE_COLUMNS))
    print_table(headings, [console_row(line["step"], line) for line in lines[-5:]], headings)
    checkpoints = run.checkpoints()
    latest = f", the latest {checkpoints[-1].state_path}" if checkpoints else ""
    worries = f"{one.alarms} alarms and {one.warnings} warnings" if one.alarms or one.warnings else "nothing alarming"
    typer.echo(f"\n{len(checkpoints)} checkpoints{latest}\nThe doctor said {worries}: mint doctor {run.path}")
    taken = run.rollout_steps()
    if taken:
        records = sorted(run.rollouts(taken[-1]), key=lambda record: record.reward)
        typer.echo(f"\nBest and worst of step {taken[-1]}, tokens coloured by advantage:")
        _answers([records[-1], records[0]] if len(records) > 1 else records)
        typer.echo(f"\nCloser: mint show {run.path} --step {taken[-1]}")


def _groups(records: Sequence[RolloutRecord]) -> None:
    groups: dict[int, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record)
    rows = []
    for number, members in sorted(groups.items()):
        rewards = [record.reward for record in members]
        mean = sum(rewards) / len(rewards)
        signal = "" if min(rewards) != max(rewards) else "none"
        prompt = " ".join(members[0].prompt_text.split())[-60:]
        rows.append((number, prompt, f"{mean:.2f}", " ".join(f"{reward:g}" for reward in sorted(rewards)), signal))
    print_table(("group", "prompt", "mean", "rewards", "signal"), rows, ("group", "mean"))


def _answers(records: Sequence[RolloutRecord]) -> None:
    """Prompts and answers, best first."""
    from rich.text import Text

    from mint.rl.report.samples import token_advantages

    prompt = None
    largest = max((abs(value) for record in records for value in token_advantages(record)), default=0.0) or 1.0
    for record in sorted(records, key=lambda record: -record.reward):
        if record.prompt_text != prompt:
            prompt = record.prompt_text
            put(Text(f"\n{prompt}", style="bold"))
        advantage = "" if record.advantage is None else f", advantage {record.advantage:+.3f}"
        head = f"  member {record.member}: reward {record.reward:g}{advantage}, {sum(record.mask)} tokens, "
        put(Text(f"{head}{record.stop_reason or 'no stop reason'}", style="dim"))
        put(Text("  ") + _coloured(record, largest))


def _coloured(record: RolloutRecord, largest: float) -> Text:
    """The answer, each token green or red by its advantage, the deeper the larger."""
    from rich.text import Text

    from mint.rl.report.samples import token_advantages

    text = Text()
    for piece, value, ours in zip(record.completion_pieces, token_advantages(record), record.mask, strict=True):
        depth = round(60 + 120 * min(abs(value) / largest, 1.0))
        colour = f"rgb(0,{depth},0)" if value > 0 else f"rgb({depth},0,0)"
        style = "dim italic" if not ours else f"white on {colour}" if value else ""
        text.append(piece.replace("\n", "⏎"), style=style)
    return text


def _tokens(record: RolloutRecord) -> None:
    _answers([record])
    rows = []
    for n, piece in enumerate(record.completion_pieces):
        ours = bool(record.mask[n])
        trained = record.train_logprobs[n] if record.train_logprobs else None
        ratio = math.exp(trained - record.logprobs[n]) if trained is not None and ours else None
        advantage = record.advantages[n] if record.advantages and ours else None
        rows.append(
            (
                n,
                repr(piece),
                "policy" if ours else "environment",
                figure(record.logprobs[n] if ours else None, "{:.4f}"),
                figure(trained if ours else None, "{:.4f}"),
                figure(ratio, "{:.4f}"),
                figure(advantage, "{:+.4f}"),
            )
        )
    columns = ("n", "token", "by", "log-prob", "trainer's", "ratio", "advantage")
    print_table(columns, rows, ("n", "log-prob", "trainer's", "ratio", "advantage"))
