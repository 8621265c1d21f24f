"""The first bad checkpoint of a run, in ceil(log2 n) evaluations.

A plain binary search, so it assumes what every bisection does: once bad, a run stays bad. How a checkpoint is evaluated
is handed in; `mint.rl.recheck` does it on the run's own holdout.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from mint.errors import BadRequest
from mint.rl.rundir import CheckpointRecord

Measure = Callable[[CheckpointRecord], Awaitable[float]]


@dataclass(frozen=True)
class Verdict:
    first_bad: CheckpointRecord
    last_good: CheckpointRecord | None
    """None: even the first checkpoint is bad."""
    limit: float
    measured: dict[str, float] = field(default_factory=dict)
    """By checkpoint, those that were evaluated, in order."""


async def bisect(
    checkpoints: Sequence[CheckpointRecord],
    measure: Measure,
    limit: float | None = None,
    lower_is_better: bool = False,
) -> Verdict:
    """A checkpoint is bad if its measure is below `limit` (above it, where lower is better). The last one is taken to
    be bad. Without a limit the first and the last are measured too, the first is taken to be good, and the limit is
    half way between."""
    if len(checkpoints) < 2:
        raise BadRequest(f"there are {len(checkpoints)} checkpoints to choose from; bisecting needs two (save_every).")
    measured: dict[int, float] = {}

    async def value(index: int) -> float:
        if index not in measured:
            measured[index] = await measure(checkpoints[index])
        return measured[index]

    sign = -1.0 if lower_is_better else 1.0
    first = 0
    if limit is None:
        good, bad = await value(0), await value(len(checkpoints) - 1)
        if sign * good <= sign * bad:
            raise BadRequest(
                f"checkpoint {checkpoints[0].name} measures {good:.4g} and {checkpoints[-1].name} {bad:.4g}: it did "
                "not get worse, so there is nothing to find. Give a limit if you mean something else."
            )
        limit, first = (good + bad) / 2, 1
    found = await first_true(first, len(checkpoints) - 1, lambda i: _is_bad(value(i), limit, sign))
    return Verdict(
        checkpoints[found],
        checkpoints[found - 1] if found else None,
        limit,
        {checkpoints[i].name: measured[i] for i in sorted(measured)},
    )


async def _is_bad(value: Awaitable[float], limit: float, sign: float) -> bool:
    return sign * await value < sign * limit


async def first_true(low: int, high: int, test: Callable[[int], Awaitable[bool]]) -> int:
    """The smallest index in low..high for which the test holds, if it holds from there on and at `high`, which is not
    tested: ceil(log2(high - low + 1)) tests."""
    while low < high:
        middle = (low + high) // 2
        if await test(middle):
            high = middle
        else:
            low = middle + 1
    return low
