"""What verbs print: tables or JSON, a bar on what takes time, a spinner where there is nothing to count.

Tables and results go to standard output, everything that only accompanies the work to standard error, so that a pipe
gets the result alone.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

PIPE_WIDTH = 240

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Address = Annotated[
    str | None, typer.Option(help="Server.", show_default="MINT_BASE_URL, else a server of this command's own")
]


def print_json(value: Any) -> None:
    """NaN and infinity, which JSON has no word for, become null."""
    typer.echo(json.dumps(_finite(value), indent=2, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Iterable[str] = ()) -> None:
    """Columns named in `numbers` are set to the right."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    right = set(numbers)
    for column in columns:
        number = column in right
        table.add_column(
            column, justify="right" if number else "left", no_wrap=number or column == columns[0], overflow="fold"
        )
    for row in rows:
        table.add_row(*(cell if hasattr(cell, "__rich__") else _plain(cell) for cell in row))
    show(table)


def show(what: RenderableType) -> None:
    from rich.console import Console

    # A pipe has no width of its own, and a file is not the place to wrap lines at 80 columns.
    # Nor is the id of a run, which has `:train:` in it, the place for a picture of one.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, emoji=False)
    console.print(what, highlight=False)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """For work of unknown length; silent where nobody looks."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(what):
            yield
    else:
        yield


def counted(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar, the rate and the time left on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total, rate="")
        for item in items:
            yield item
            bar.advance(task)
            bar.update(task, rate=_rate(bar.tasks[0].speed))


def _rate(speed: float | None) -> str:
    if not speed:
        return ""
    return f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each"


def figure(value: object, form: str = "{:.3f}") -> str:
    """A number for a table; nothing for one that is not there."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return form.format(value)


def seconds(value: float | None) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `5 days`."""
    if value is None:
        return ""
    if value < 90:
        return f"{value:.0f} s"
    minutes = round(value / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days"


def _plain(cell: object) -> str:
    from rich.markup import escape

    return "" if cell is None else escape(str(cell))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
