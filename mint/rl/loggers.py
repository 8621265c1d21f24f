"""Where metrics go as a run proceeds: metrics.jsonl always, a live console table, other people's trackers on demand.

A logger is anything with `log(step, metrics)`, `say(text)` and `close()`. Metric names are an API: loggers pass them on
unchanged.
Trackers are extras; their packages are imported only when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from mint.errors import BadRequest
from mint.rl.rundir import RunDir

Metrics = Mapping[str, float]


class MetricsLogger(Protocol):
    def log(self, step: int, metrics: Metrics) -> None: ...

    def say(self, text: str) -> None:
        """Something a person following the run should read now."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RunInfo:
    """What a logger may want to know of the run it follows."""

    run_dir: RunDir
    total_steps: int
    config: dict[str, Any] = field(default_factory=dict)
    project: str | None = None
    name: str | None = None


class NullLogger:
    """Says nothing, so that nobody has to ask whether there is a logger."""

    def log(self, step: int, metrics: Metrics) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class JsonlLogger(NullLogger):
    """metrics.jsonl of the run directory."""

    def __init__(self, info: RunInfo) -> None:
        self.run_dir = info.run_dir

    def log(self, step: int, metrics: Metrics) -> None:
        self.run_dir.append_metrics(step, dict(metrics))


class ManyLoggers:
    """Several loggers as one."""

    def __init__(self, loggers: list[MetricsLogger]) -> None:
        self.loggers = loggers

    def log(self, step: int, metrics: Metrics) -> None:
        for logger in self.loggers:
            logger.log(step, metrics)

    def say(self, text: str) -> None:
        for logger in self.loggers:
            logger.say(text)

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()


# Heading, metrics in order of preference, format.
CONSOLE_COLUMNS: list[tuple[str, tuple[str, ...], str]] = [
    ("reward", ("env/all/reward/total",), "{:.3f}"),
    ("holdout", ("test/env/all/reward/total",), "{:.3f}"),
    ("mixed", ("env/all/by_group/frac_mixed",), "{:.0%}"),
    ("truncated", ("env/all/truncated",), "{:.0%}"),
    ("tokens", ("env/all/ac_tokens_per_turn",), "{:.1f}"),
    ("datums", ("train/datums",), "{:.0f}"),
    ("kl", ("kl_policy_base", "optim/kl_sample_train_v1"), "{:+.4f}"),
    ("entropy", ("optim/entropy",), "{:.3f}"),
    ("lr", ("optim/lr",), "{:.1e}"),
    ("T", ("sampling/temperature",), "{:.2f}"),
    ("seconds", ("time/total",), "{:.1f}"),
]
CONSOLE_ROWS = 12


def console_row(step: int, metrics: Metrics) -> list[str]:
    row = [str(step)]
    for _, names, form in CONSOLE_COLUMNS:
        value = next((metrics[name] for name in names if name in metrics), None)
        row.append("" if value is None else form.format(value))
    return row


class PaceColumn(ProgressColumn):
    """Seconds a step, as the bar has seen them lately."""

    def render(self, task: Task) -> Text:
        return Text(f"{1 / task.speed:.1f} s/step" if task.speed else "")


class ConsoleLogger:
    """The last steps as a table above a progress bar with the time left; plain lines where there is no terminal."""

    def __init__(self, info: RunInfo, console: Console | None = None) -> None:
        self.console = console or Console()
        self.rows: list[list[str]] = []
        self.total = info.total_steps
        columns = ("{task.description}", "{task.percentage:>3.0f}%")
        self.progress = Progress(
            *(TextColumn(column) for column in columns),
            BarColumn(),
            MofNCompleteColumn(),
            PaceColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.progress.add_task(info.name or info.run_dir.path.name, total=info.total_steps)
        self.live = Live(self._view(), console=self.console, refresh_per_second=4)
        if self.console.is_terminal:
            self.live.start()

    def log(self, step: int, metrics: Metrics) -> None:
        self.rows = [*self.rows, console_row(step, metrics)][-CONSOLE_ROWS:]
        self.progress.update(self.task, completed=min(step + 1, self.total))
        if self.console.is_terminal:
            self.live.update(self._view())
        else:
            headings = [heading for heading, _, _ in CONSOLE_COLUMNS]
            cells = zip(headings, self.rows[-1][1:], strict=True)
            text = ", ".join(f"{heading}={cell}" for heading, cell in cells if cell)
            self.console.print(f"Step {step}: {text}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        if self.live.is_started:
            self.live.stop()

    def _view(self) -> Group:
        table = Table("step", *(heading for heading, _, _ in CONSOLE_COLUMNS), box=None, header_style="bold")
        for column in table.columns:
            column.justify = "right"
        for row in self.rows:
            table.add_row(*row)
        return Group(table, self.progress)


class TensorBoardLogger(NullLogger):
    """Event files in `<run directory>/tensorboard`."""

    def __init__(self, info: RunInfo) -> None:
        writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self.writer = writer.EventFileWriter(str(info.run_dir.path / "tensorboard"))

    def log(self, step: int, metrics: Metrics) -> None:
        event_pb2 = _import("tensorboard.compat.proto.event_pb2", "tensorboard")
        summary_pb2 = _import("tensorboard.compat.proto.summary_pb2", "tensorboard")
        values = [summary_pb2.Summary.Value(tag=name, simple_value=float(v)) for name, v in metrics.items()]
        summary = summary_pb2.Summary(value=values)
        self.writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _WandbLike(NullLogger):
    """W&B, and Trackio, which has the same three calls."""

    package: str

    def __init__(self, info: RunInfo) -> None:
        self.tracker = _import(self.package, self.package)
        options = {"dir": str(info.run_dir.path)} if self.package == "wandb" else {}
        self.tracker.init(project=info.project or "mint", name=info.name, config=info.config, **options)

    def log(self, step: int, metrics: Metrics) -> None:
        self.tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        self.tracker.finish()


class WandbLogger(_WandbLike):
    package = "wandb"


class TrackioLogger(_WandbLike):
    package = "trackio"


LOGGERS: dict[str, Callable[[RunInfo], MetricsLogger]] = {
    "console": ConsoleLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "trackio": TrackioLogger,
}


def make_logger(names: tuple[str, ...], info: RunInfo) -> MetricsLogger:
    """metrics.jsonl and whatever is named."""
    unknown = [name for name in names if name not in LOGGERS]
    if unknown:
        raise BadRequest(
            f"no logger is called {unknown[0]!r}; there are {', '.join(LOGGERS)} (metrics.jsonl is always on)."
        )
    return ManyLoggers([JsonlLogger(info), *(LOGGERS[name](info) for name in names)])


def _import(module: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadRequest(f"this logger needs the package {package!r}: pip install {package}") from error
