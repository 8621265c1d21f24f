import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mint.errors import BadRequest
from mint.rl.strategies import FailFast, GroupFailed, MinViableGroup, RetryOnFailure, RolloutStrategy, as_strategy
from tests import hourglass

Attempt = Callable[[int, int], Awaitable[str]]


def failing(times: dict[int, int], log: list[tuple[int, int]] | None = None) -> Attempt:
    """Member i fails its first times[i] attempts."""

    async def attempt(member: int, failures: int) -> str:
        if log is not None:
            log.append((member, failures))
        await asyncio.sleep(0)
        if failures < times.get(member, 0):
            raise ValueError(f"{member} failed")
        return f"{member} after {failures}"

    return attempt


@pytest.mark.parametrize("strategy", [FailFast(), RetryOnFailure(), MinViableGroup()])
def test_without_failures_all_finish_in_order(strategy: RolloutStrategy) -> None:
    collected = hourglass.run(strategy.collect(failing({}), 4))
    assert list(collected.finished.items()) == [(i, f"{i} after 0") for i in range(4)]
    assert collected.errors == []


def test_fail_fast_raises_the_error_itself_and_leaves_nothing_running() -> None:
    cancelled = []

    async def attempt(member: int, failures: int) -> None:
        if member == 1:
            raise ValueError("one failed")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(member)
            raise

    with pytest.raises(ValueError, match="one failed"):
        hourglass.run(FailFast().collect(attempt, 3))
    assert sorted(cancelled) == [0, 2]


def test_retry_tries_failed_members_again_and_keeps_their_errors() -> None:
    log: list[tuple[int, int]] = []
    collected = hourglass.run(RetryOnFailure(max_retries=3).collect(failing({1: 2, 3: 1}, log), 4))
    assert collected.finished == {0: "0 after 0", 1: "1 after 2", 2: "2 after 0", 3: "3 after 1"}
    assert sorted(error.error_message for error in collected.errors) == ["1 failed", "1 failed", "3 failed"]
    assert sorted(log) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0), (3, 1)]


def test_retry_gives_up_when_its_budget_is_spent() -> None:
    with pytest.raises(GroupFailed, match="3 failed rollouts; the last: ValueError: 1 failed") as caught:
        hourglass.run(RetryOnFailure(max_retries=2).collect(failing({1: 9}), 4))
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_attempt_that_takes_too_long_has_failed() -> None:
    async def slow_at_first(member: int, failures: int) -> str:
        await asyncio.sleep(60 if failures == 0 and member == 0 else 0)
        return "done"

    collected = hourglass.run(RetryOnFailure(per_rollout_timeout=0.02).collect(slow_at_first, 2))
    assert collected.finished == {0: "done", 1: "done"}
    assert [error.error_type for error in collected.errors] == ["TimeoutError"]


def test_a_viable_group_does_without_its_failed_members() -> None:
    collected = hourglass.run(MinViableGroup(max_retries=0).collect(failing({2: 9}), 4))
    assert list(collected.finished) == [0, 1, 3]
    assert len(collected.errors) == 1


def test_a_viable_group_spends_retries_only_below_its_floor() -> None:
    async def late_failure(member: int, failures: int) -> str:
        await asyncio.sleep(0.05 if member == 3 else 0)
        if member == 3:
            raise ValueError
        return "ok"

    log: list[int] = []

    async def attempt(member: int, failures: int) -> str:
        log.append(member)
        return await late_failure(member, failures)

    collected = hourglass.run(MinViableGroup(max_retries=3).collect(attempt, 4))
    assert list(collected.finished) == [0, 1, 2]
    assert log.count(3) == 1


def test_below_its_floor_the_group_fails() -> None:
    with pytest.raises(GroupFailed):
        hourglass.run(MinViableGroup(max_retries=1).collect(failing({0: 9, 1: 9}), 4))
    with pytest.raises(BadRequest, match="min_successful is 5, but the group has 4"):
        hourglass.run(MinViableGroup(min_successful=5).collect(failing({}), 4))


def test_a_configs_word_for_it() -> None:
    assert as_strategy(None) == as_strategy(False) == FailFast()
    assert as_strategy(True) == RetryOnFailure()
    assert as_strategy(MinViableGroup(2)) == MinViableGroup(2)
