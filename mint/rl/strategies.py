"""What a group does when some of its members fail: give up, try again, or go on with those that finished.

A strategy sees only numbers: it is handed a function that makes one attempt for one member. Environments, policies and
seeds are the business of `mint.rl.rollouts`.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mint.errors import BadRequest, MintError
from mint.rl.types import RolloutError

T = TypeVar("T")
Attempt = Callable[[int, int], Awaitable[T]]
"""(member, how many times it failed before) -> its result."""


class GroupFailed(MintError):
    """Too few members finished; `errors` says what happened to the others."""

    def __init__(self, errors: list[RolloutError]) -> None:
        super().__init__(errors)
        self.errors = errors

    def __str__(self) -> str:
        last = f"; the last: {self.errors[-1].error_type}: {self.errors[-1].error_message}" if self.errors else ""
        return f"the group failed after {len(self.errors)} failed rollouts{last}"


@dataclass
class Collected(Generic[T]):
    finished: dict[int, T] = field(default_factory=dict)
    """By member, in order."""
    errors: list[RolloutError] = field(default_factory=list)


class RolloutStrategy(ABC):
    """Subclass as a frozen dataclass of plain values: strategies are pickled and stored in configs."""

    catches_group_errors = True
    """Whether a failed group is skipped; if not, its error ends the run."""

    @abstractmethod
    async def collect(self, attempt: Attempt[T], size: int) -> Collected[T]:
        """Raises what it may when the group is lost, with no attempt left running."""


@dataclass(frozen=True)
class FailFast(RolloutStrategy):
    """The first failure ends the group, and the run."""

    catches_group_errors = False

    async def collect(self, attempt: Attempt[T], size: int) -> Collected[T]:
        try:
            return await _collect(attempt, size, size, 0, None)
        except GroupFailed as failed:
            raise failed.__cause__ or failed from None


@dataclass(frozen=True)
class RetryOnFailure(RolloutStrategy):
    """Failed members try again in fresh environments; all must finish, since leaving out those that fail biases the
    group towards what is easy to run."""

    max_retries: int = 3
    """For the whole group."""
    per_rollout_timeout: float = 0
    """Seconds before an attempt counts as failed; 0: no limit."""

    async def collect(self, attempt: Attempt[T], size: int) -> Collected[T]:
        return await _collect(attempt, size, size, self.max_retries, self.per_rollout_timeout or None)


@dataclass(frozen=True)
class MinViableGroup(RolloutStrategy):
    """Retries while too few have finished, then keeps the group without its failed members."""

    min_successful: int | None = None
    """None: three quarters of the group, rounded up."""
    max_retries: int = 3
    per_rollout_timeout: float | None = None

    async def collect(self, attempt: Attempt[T], size: int) -> Collected[T]:
        needed = math.ceil(0.75 * size) if self.min_successful is None else self.min_successful
        if not 1 <= needed <= size:
            raise BadRequest(f"min_successful is {needed}, but the group has {size} members.")
        return await _collect(attempt, size, needed, self.max_retries, self.per_rollout_timeout)


def as_strategy(rollout_error_tolerance: bool | RolloutStrategy | None) -> RolloutStrategy:
    """A config's word for it: None or False is `FailFast`, True is `RetryOnFailure` with its defaults."""
    if isinstance(rollout_error_tolerance, RolloutStrategy):
        return rollout_error_tolerance
    return RetryOnFailure() if rollout_error_tolerance else FailFast()


async def _collect(attempt: Attempt[T], size: int, needed: int, retries: int, timeout: float | None) -> Collected[T]:
    async def timed(member: int, failures: int) -> T:
        async with asyncio.timeout(timeout):
            return await attempt(member, failures)

    running: dict[asyncio.Task[T], tuple[int, int]] = {}

    def begin(member: int, failures: int) -> None:
        running[asyncio.create_task(timed(member, failures))] = (member, failures)

    collected: Collected[T] = Collected()
    for member in range(size):
        begin(member, 0)
    try:
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=running.__getitem__):
                member, failures = running.pop(task)
                error = task.exception()
                if error is None:
                    collected.finished[member] = task.result()
                    continue
                collected.errors.append(RolloutError.of(error))
                if retries > 0 and len(collected.finished) < needed:
                    retries -= 1
                    begin(member, failures + 1)
                elif len(collected.finished) + len(running) < needed:
                    raise GroupFailed(collected.errors) from error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    collected.finished = dict(sorted(collected.finished.items()))
    return collected
