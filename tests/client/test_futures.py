"""APIFuture: one result, several ways to wait for it."""

import asyncio
import concurrent.futures
import logging
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from mint.client.futures import APIFuture, start
from tests.waiting import PATIENCE, eventually


async def _value(value: int) -> int:
    return value


async def _after(gate: concurrent.futures.Future[None], value: int) -> int:
    await asyncio.shield(asyncio.wrap_future(gate))
    return value


@pytest.fixture
def gate() -> Iterator[concurrent.futures.Future[None]]:
    """What is behind it goes on when it has a result, at the end of the test at the latest."""
    made: concurrent.futures.Future[None] = concurrent.futures.Future()
    yield made
    if not made.done():
        made.set_result(None)


async def _failure() -> int:
    raise ValueError("at fault") from KeyError("cause")


def test_result_blocks_until_the_value_is_there(gate: concurrent.futures.Future[None]) -> None:
    future = start(_after(gate, 3))
    assert not future.done()
    threading.Timer(0.02, gate.set_result, (None,)).start()
    assert future.result(timeout=PATIENCE) == 3
    assert future.done()
    assert future.exception() is None


def test_it_can_be_awaited_from_any_loop_and_more_than_once() -> None:
    async def use() -> list[int]:
        future = start(_value(3))
        return [
            await future,
            await future.result_async(timeout=PATIENCE),
            *await asyncio.gather(start(_value(4)), future),
        ]

    assert asyncio.run(use()) == [3, 3, 4, 3]


def test_a_failure_is_raised_each_time_with_its_cause() -> None:
    future = start(_failure())
    for _ in range(2):
        with pytest.raises(ValueError, match="at fault") as raised:
            future.result()
        assert isinstance(raised.value.__cause__, KeyError)

    async def use() -> int:
        return await future

    with pytest.raises(ValueError, match="at fault"):
        asyncio.run(use())


def test_running_out_of_time_leaves_the_call_going(gate: concurrent.futures.Future[None]) -> None:
    future = start(_after(gate, 3))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.001)

    async def use() -> int:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.001)
        gate.set_result(None)
        return await future

    assert asyncio.run(use()) == 3


def test_the_standard_library_takes_it_for_a_future() -> None:
    futures = [start(_value(n)) for n in range(3)]
    assert {f.result() for f in concurrent.futures.as_completed(futures)} == {0, 1, 2}
    assert futures[0].future() is futures[0]


def test_calls_begin_in_the_order_they_are_made() -> None:
    begun: list[int] = []

    async def note(n: int) -> None:
        begun.append(n)

    for future in [start(note(n)) for n in range(50)]:
        future.result()
    assert begun == list(range(50))


def test_only_cancellable_calls_are_cancelled(gate: concurrent.futures.Future[None]) -> None:
    kept, given_up = start(_after(gate, 3)), start(_after(gate, 4), cancellable=True)
    assert not kept.cancel()
    assert given_up.cancel()
    gate.set_result(None)
    assert kept.result() == 3
    with pytest.raises(concurrent.futures.CancelledError):
        given_up.result()


def test_cancelling_reaches_the_work_itself() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    future = start(work(), cancellable=True)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.05)

    assert begun.wait(PATIENCE)
    asyncio.run(give_up())
    assert ended.wait(PATIENCE)


def test_ctrl_c_interrupts_a_wait(gate: concurrent.futures.Future[None]) -> None:
    future = start(_after(gate, 3))
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        future.result()
    assert not future.done()


def test_a_failure_nobody_asks_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    asked = start(_failure())
    with pytest.raises(ValueError, match="at fault"):
        asked.result()
    dropped: APIFuture[int] | None = start(_failure())
    concurrent.futures.wait([dropped])

    def logged() -> list[str]:
        start(_value(1)).result()  # lets the loop drop its own references
        return [record.getMessage() for record in caplog.records if "at fault" in record.getMessage()]

    with caplog.at_level(logging.ERROR, "mint"):
        del asked
        dropped = None
        assert eventually(logged) == ["a call failed and nobody asked for its result: ValueError: at fault"]


def test_blocking_in_a_callback_is_refused_not_hung_on(gate: concurrent.futures.Future[None]) -> None:
    refused: list[BaseException] = []
    listened: concurrent.futures.Future[None] = concurrent.futures.Future()
    slow, quick = start(_after(gate, 1)), start(_after(listened, 2))

    def block(_: object) -> None:
        try:
            slow.result()
        except RuntimeError as error:
            refused.append(error)
        gate.set_result(None)

    quick.add_done_callback(block)
    listened.set_result(None)
    assert slow.result(PATIENCE) == 1
    assert "callback" in str(refused[0])


def test_a_result_asked_for_too_early_is_told_to_wait() -> None:
    async def work() -> int:
        return 1

    future = start(work())
    with pytest.raises(AttributeError, match=r"no 'sequences': take its result first, by \.result\(\) or await"):
        future.sequences  # noqa: B018
    assert future.result() == 1 and not hasattr(future, "sequences")
