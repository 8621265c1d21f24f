"""Numbers that change over a run: learning rate and temperature.

A schedule is a pure function of the step, so a resumed run continues it by asking. Written as a number (`2e-5`), as a
short string (`"cosine 2e-5 -> 0, warmup 10"`, `"linear 1.0 -> 0.7"`, `"constant 0.8"`) or as a `Schedule`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from mint.errors import BadRequest

# How far from start (0) to end (1), by how much of the run is done.
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 0.0,
    "linear": lambda done: done,
    "cosine": lambda done: (1 - math.cos(math.pi * done)) / 2,
}


@dataclass(frozen=True)
class Schedule:
    """`warmup` steps rising evenly from near 0 to `start`, then along the shape from `start` to `end`."""

    start: float
    end: float | None = None
    """The value at the last step, for every shape but constant."""
    shape: str = "constant"
    warmup: int = 0
    """Steps; the first of n warm-up steps has start / (n + 1)."""

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise BadRequest(f"no schedule has the shape {self.shape!r}; there are {', '.join(SHAPES)}.")
        if (self.shape == "constant") != (self.end is None):
            raise BadRequest(
                f"a {self.shape} schedule from {self.start} to {self.end}: a constant one has no end value, "
                "and linear and cosine need one."
            )
        if self.warmup < 0:
            raise BadRequest(f"warmup is {self.warmup} steps; it must be 0 or more.")

    def __call__(self, step: int, total_steps: int) -> float:
        """The value at `step` of 0..total_steps-1; later steps keep the last value."""
        if step < self.warmup:
            return self.start * (step + 1) / (self.warmup + 1)
        last = total_steps - 1 - self.warmup
        done = min((step - self.warmup) / last, 1.0) if last > 0 else 0.0
        end = self.start if self.end is None else self.end
        return self.start + (end - self.start) * SHAPES[self.shape](done)


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_TEXT = re.compile(rf"(?:(\w+)\s+)?({_NUMBER})(?:\s*->\s*({_NUMBER}))?(?:\s*,\s*warmup\s+(\d+))?")


def as_schedule(value: float | str | Schedule) -> Schedule:
    if isinstance(value, Schedule):
        return value
    if isinstance(value, int | float):
        return Schedule(float(value))
    match = _TEXT.fullmatch(value.strip())
    if not match:
        raise BadRequest(
            f"{value!r} is not a schedule; write a number, or shape start -> end, warmup steps, as in "
            "'cosine 2e-5 -> 0, warmup 10'."
        )
    shape, start, end, warmup = match.groups()
    return Schedule(
        float(start),
        None if end is None else float(end),
        shape or ("constant" if end is None else "linear"),
        int(warmup or 0),
    )
