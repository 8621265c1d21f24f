"""A run in a line: where it stands, how far it got, what it reached, whether the doctor is worried.

Read from the run directory alone, so it says the same of a run on another machine's disk. What a run is doing now can
only be told from when it last wrote something.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mint.errors import BadRequest
from mint.rl.rundir import HOLDOUT, REWARD, Json, RunDir, read_jsonl

State = Literal["starting", "running", "stopped", "finished", "broken"]
NO_STEP = ("step", "test/", "time/", "progress/")
"""Of these names is a line made that tells of no step."""
QUIET_SECONDS = 60.0
QUIET_STEPS = 5.0
"""A run that has written nothing for this long, and for as long as this many of its steps take, is not running."""


@dataclass(frozen=True)
class RunSummary:
    name: str
    path: str
    state: State
    steps: int
    """Trained so far."""
    total_steps: int | None
    reward: float | None
    """Of the last step."""
    holdout: float | None
    """The last one measured."""
    first_holdout: float | None
    alarms: int
    warnings: int
    seconds_left: float | None
    written: float
    """When anything was last written, as a time stamp."""
    model: str | None
    recipe: str | None
    note: str = ""
    """What is wrong with the directory, if it cannot be read."""

    def to_json(self) -> Json:
        return asdict(self)


def find_runs(folder: str | Path) -> list[RunDir]:
    """The runs in a folder, at any depth, newest first. A run directory itself is the only one found in it."""
    folder = Path(folder).expanduser()
    if (folder / "config.json").is_file():
        return [RunDir(folder)]
    found = [RunDir(file.parent) for file in folder.rglob("config.json") if (file.parent / "metrics.jsonl").is_file()]
    started = [RunDir(file.parent) for file in folder.glob("*/config.json")]  # a run that has no metrics yet
    by_path = {run.path: run for run in (*found, *started)}
    return sorted(by_path.values(), key=last_written, reverse=True)


def last_written(run: RunDir) -> float:
    files = (run.config_file, run.metrics_file, run.checkpoints_file, run.log_file)
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def summarise(run: RunDir, now: float | None = None) -> RunSummary:
    """Never fails on what a run directory may hold: `broken` and its `note` say what cannot be read."""
    now = time.time() if now is None else now
    note, config, lines, health = "", {}, [], []
    try:
        config = run.config() or {}
        lines = run.metrics()
        health = read_jsonl(run.health_file)
        checkpoint = run.last_checkpoint()
    except (BadRequest, ValueError, TypeError) as error:
        note, checkpoint = str(error), None
    steps = _steps(lines)
    total = _total(config, lines)
    written = last_written(run)
    pace = _pace(lines)
    if _says_how_far(lines):
        finished = checkpoint is not None and checkpoint.final and (total is None or checkpoint.batch >= total)
    else:  # a loop written by hand, which may keep its checkpoints elsewhere
        finished = total is not None and steps >= total
    if note:
        state: State = "broken"
    elif finished:
        state = "finished"
    elif now - written > max(QUIET_SECONDS, QUIET_STEPS * (pace or 0.0)):
        state = "stopped"
    else:
        state = "running" if lines else "starting"
    left = pace * (total - steps) if state == "running" and pace is not None and total is not None else None
    rewards, holdouts = _values(lines, REWARD), _values(lines, HOLDOUT)
    gravest = {line["kind"]: line["severity"] for line in health if "kind" in line}
    return RunSummary(
        name=run.path.name,
        path=str(run.path),
        state=state,
        steps=steps,
        total_steps=total,
        reward=rewards[-1] if rewards else None,
        holdout=holdouts[-1] if holdouts else None,
        first_holdout=holdouts[0] if holdouts else None,
        alarms=list(gravest.values()).count("alarm"),
        warnings=list(gravest.values()).count("warning"),
        seconds_left=left,
        written=written,
        model=config.get("model_name") or config.get("base_model"),
        recipe=config.get("recipe_name"),
        note=note,
    )


def _values(lines: list[Json], names: Sequence[str]) -> list[float]:
    return [line[name] for line in lines for name in names if name in line]


def _is_step(line: Json) -> bool:
    """The line after the last step holds only an evaluation, and counts as none."""
    return "step" in line and any(not name.startswith(NO_STEP) for name in line)


def _steps(lines: list[Json]) -> int:
    return max((int(line["step"]) + 1 for line in lines if _is_step(line)), default=0)


def _says_how_far(lines: list[Json]) -> bool:
    return any("progress/done_frac" in line for line in lines)


def _total(config: Json, lines: list[Json]) -> int | None:
    planned = config.get("max_steps") or config.get("steps")
    if isinstance(planned, int) and planned:
        return planned
    shares = [(line["step"] + 1, line.get("progress/done_frac")) for line in lines if _is_step(line)]
    done = [(step, share) for step, share in shares if share]
    return round(done[-1][0] / done[-1][1]) if done else None


def _pace(lines: list[Json]) -> float | None:
    """Seconds a step, over the last ten."""
    times = [line["time/total"] for line in lines if "time/total" in line and _is_step(line)][-10:]
    return sum(times) / len(times) if times else None
