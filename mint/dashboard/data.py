"""Run directories as the pages need them, read incrementally: what was read once is kept, only new bytes are parsed.

Rollouts are `index`'s business, curves are drawn from `Run.series` by `curves`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Literal

from mint.dashboard.index import Rollouts
from mint.dashboard.tail import BrokenLine, JsonlTail
from mint.errors import BadRequest, NotFound
from mint.rl.ledger import Ledger
from mint.rl.rundir import Json, RunDir

Status = Literal["running", "finished", "stopped", "starting", "unreadable"]
DEEPEST = 3
"""Folders below the runs folder in which a run may lie."""
PATIENCE = 45.0
"""Seconds without a new line after which a run that takes no longer for a step is called stopped."""
START_PATIENCE = 600.0
"""The same before the first step: models are loaded, and an evaluation comes first."""


@dataclass(frozen=True)
class Series:
    steps: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.steps)


EMPTY = Series([], [])


@dataclass(frozen=True)
class Alarm:
    """A line of health.jsonl."""

    step: int
    kind: str
    severity: str
    sentence: str


class Run:
    """One run directory, followed."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.dir = RunDir(path)
        self.rollouts = Rollouts(self.dir)
        self._lock = RLock()
        self._metrics = JsonlTail(self.dir.metrics_file)
        self._checkpoints = JsonlTail(self.dir.checkpoints_file)
        self._health = JsonlTail(self.dir.health_file)
        self._ledger_lines = JsonlTail(self.dir.ledger_file)
        self._series: dict[str, Series] = {}
        self.last_step = -1
        self.checkpoints: list[Json] = []
        self.health: list[Json] = []
        self._ledger = Ledger(self.dir, lines=())
        self._config: tuple[float, Json | None, str | None] = (-1.0, None, None)
        self.version = 0
        """Grows whenever there is something new."""

    # ------------------------------------------------------------------------------------------------ reading

    def refresh(self) -> int:
        """Takes in what was written since; returns `version`."""
        with self._lock:
            if self._metrics.changed:
                self._take_metrics()
            if self._checkpoints.changed:
                self.checkpoints = self._followed(self._checkpoints, self.checkpoints)
            if self._health.changed:
                self.health = self._followed(self._health, self.health)
            return self.version

    def _take_metrics(self) -> None:
        anew, lines = self._metrics.read()
        if anew:
            self._series, self.last_step = {}, -1
        if anew or lines:
            self.version += 1
        for line in lines:
            step = line.get("step")
            if not isinstance(step, int | float):
                continue
            self.last_step = max(self.last_step, int(step))
            for name, value in line.items():
                if name != "step" and isinstance(value, int | float):
                    series = self._series.setdefault(name, Series([], []))
                    series.steps.append(int(step))
                    series.values.append(float(value))

    def _followed(self, tail: JsonlTail, before: list[Json]) -> list[Json]:
        anew, lines = tail.read()
        if anew or lines:
            self.version += 1
        return lines if anew else before + lines

    def ledger(self) -> Ledger:
        """Read when it is asked for, since only one page wants it."""
        with self._lock:
            if self._ledger_lines.changed:
                anew, lines = self._ledger_lines.read()
                if anew:
                    self._ledger = Ledger(self.dir, lines=())
                for line in lines:
                    if "choice" in line or "groups" in line:
                        self._ledger.take(line)
            return self._ledger

    # ------------------------------------------------------------------------------------------------ what it says

    @property
    def config(self) -> Json:
        return self._read_config()[1] or {}

    @property
    def config_fault(self) -> str | None:
        return self._read_config()[2]

    def _read_config(self) -> tuple[float, Json | None, str | None]:
        try:
            written = self.dir.config_file.stat().st_mtime
        except OSError:
            return -1.0, None, None
        if written != self._config[0]:
            try:
                config, fault = self.dir.config(), None
            except (ValueError, OSError) as error:
                config, fault = None, f"{self.dir.config_file} cannot be read: {error}"
            self._config = written, config if isinstance(config, dict) else None, fault
        return self._config

    @property
    def broken(self) -> list[BrokenLine]:
        tails = (self._metrics, self._checkpoints, self._health, self._ledger_lines)
        return [line for tail in tails for line in tail.broken]

    @property
    def names(self) -> list[str]:
        return sorted(self._series)

    def series(self, *names: str) -> Series:
        """The first of these metrics that the run has."""
        return next((self._series[name] for name in names if name in self._series), EMPTY)

    def last(self, *names: str) -> float | None:
        series = self.series(*names)
        return series.values[-1] if series.values else None

    @property
    def done(self) -> float | None:
        """Share of its steps done, as the run itself says."""
        return self.last("progress/done_frac")

    @property
    def total_steps(self) -> int | None:
        series = self.series("progress/done_frac")
        if series.values and series.values[0] > 0:
            return round((series.steps[0] + 1) / series.values[0])
        planned = self.config.get("max_steps") or self.config.get("steps")
        return planned if isinstance(planned, int) else None

    @property
    def trained_steps(self) -> int:
        total = self.total_steps
        return min(self.last_step + 1, total) if total else self.last_step + 1

    @property
    def step_seconds(self) -> float | None:
        recent = [value for value in self.series("time/total").values[-20:] if math.isfinite(value)]
        return sum(recent) / len(recent) if recent else None

    @property
    def status(self) -> Status:
        if self.config_fault:
            return "unreadable"
        if (self.done or 0) >= 1 or any(line.get("final") for line in self.checkpoints) or self._is_whole_by_hand:
            return "finished"
        silent = time.time() - self.touched
        if self.last_step < 0:
            return "starting" if silent < START_PATIENCE else "stopped"
        return "running" if silent < max(PATIENCE, 6 * (self.step_seconds or 0)) else "stopped"

    @property
    def _is_whole_by_hand(self) -> bool:
        """A loop written by hand says only how many steps it means to take."""
        return self.done is None and self.total_steps is not None and self.last_step + 1 >= self.total_steps

    @property
    def seconds_left(self) -> float | None:
        if self.status != "running" or self.total_steps is None or self.step_seconds is None:
            return None
        return max(self.total_steps - self.trained_steps, 0) * self.step_seconds

    @cached_property
    def began(self) -> float:
        """When the configuration was written."""
        return self._time(self.dir.config_file) or self.touched

    @property
    def touched(self) -> float:
        """When something was last written."""
        return max(self._time(self.dir.metrics_file), self._time(self.dir.config_file), self._time(self.dir.log_file))

    @staticmethod
    def _time(file: Path) -> float:
        try:
            return file.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def alarms(self) -> list[Alarm]:
        return [
            Alarm(int(line.get("step", 0)), str(line["kind"]), str(line.get("severity")), str(line.get("sentence", "")))
            for line in self.health
            if "kind" in line
        ]

    @property
    def family(self) -> str:
        """What runs that differ only in their seed have in common."""
        kept = {k: v for k, v in self.config.items() if k not in ("seed", "log_path", "base_url", "wandb_name")}
        return repr(sorted(kept.items(), key=lambda item: item[0])) if kept else self.name


class Library:
    """All runs below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self._runs: dict[str, Run] = {}
        self._lock = RLock()

    def names(self) -> list[str]:
        """Of the folders that look like runs; the folder itself may be one, and is then called by its name."""
        return [name for name, _ in self._found()]

    def runs(self) -> list[Run]:
        """Refreshed, the one touched last first."""
        runs = [self._run(name, path) for name, path in self._found()]
        for run in runs:
            run.refresh()
        return sorted(runs, key=lambda run: -run.touched)

    def run(self, name: str) -> Run:
        """The run of this name, which can only be one below the folder."""
        path = self._path_of(name)
        if not path.is_dir():
            raise NotFound(f"There is no folder {name!r} in the runs folder; look at the list of runs.")
        if not is_run(path):
            raise BadRequest(
                f"The folder {name!r} is not a run: it has neither metrics.jsonl nor the config.json of a run. Choose "
                "a folder that was the log_path of one."
            )
        run = self._run(name, path)
        run.refresh()
        return run

    def within(self, part: str) -> Library:
        """The runs of one tenant, in the folder of that name."""
        return Library(self.folder / part)

    def _path_of(self, name: str) -> Path:
        if name == self.folder.name and is_run(self.folder):
            return self.folder
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder):
            raise NotFound(f"{name!r} lies outside the runs folder; only runs below it are shown.")
        return path

    def _run(self, name: str, path: Path) -> Run:
        with self._lock:
            if name not in self._runs:
                self._runs[name] = Run(name, path)
            return self._runs[name]

    def _found(self) -> Iterator[tuple[str, Path]]:
        if is_run(self.folder):
            yield self.folder.name, self.folder
        yield from self._below(self.folder, DEEPEST)

    def _below(self, folder: Path, depth: int) -> Iterator[tuple[str, Path]]:
        try:
            children = sorted(child for child in folder.iterdir() if child.is_dir() and child.name[:1] != ".")
        except OSError:
            return
        for child in children:
            if not child.resolve().is_relative_to(self.folder):
                continue
            if is_run(child):
                yield str(child.relative_to(self.folder)), child
            elif depth > 1:
                yield from self._below(child, depth - 1)


def is_run(path: Path) -> bool:
    config = path / "config.json"
    return (path / "metrics.jsonl").is_file() or (config.is_file() and _is_ours(config))


def _is_ours(config: Path) -> bool:
    """Any folder may hold a config.json, every model's does; a run's names where it is written, or cannot be read."""
    try:
        text = config.read_text(errors="replace")
    except OSError:
        return False
    return '"log_path"' in text or not text.strip().endswith("}")
