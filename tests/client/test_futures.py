"""APIFuture: one result, several ways to wait for it."""

import asyncio
import concurrent.futures
import logging
import os
import signal
import threading
import time

import pytest

from mint.client.futures import APIFuture, start


async def _value(value: int, after: float = 0.0) -> int:
    await asyncio.sleep(after)
    return value


async def _failure() -> int:
    raise ValueError("at fault") from KeyError("cause")


def test_result_blocks_until_the_value_is_there() -> None:
    future = start(_value(3, after=0.02))
    assert not future.done()
    assert future.result(timeout=5) == 3
    assert future.done()
    assert future.exception() is None


def test_it_can_be_awaited_from_any_loop_and_more_than_once() -> None:
    async def use() -> list[int]:
        future = start(_value(3))
        return [await future, await future.result_async(timeout=5), *await asyncio.gather(start(_value(4)), future)]

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


def test_running_out_of_time_leaves_the_call_going() -> None:
    future = start(_value(3, after=0.1))
    with pytest.raises(TimeoutError):
        future.result(timeout=0.001)

    async def use() -> int:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.001)
        return await future

    assert asyncio.run(use()) == 3


def test_the_standard_library_takes_it_for_a_future() -> None:
    futures = [start(_value(n, after=0.01 * (3 - n))) for n in range(3)]
    assert {f.result() for f in concurrent.futures.as_completed(futures)} == {0, 1, 2}
    assert futures[0].future() is futures[0]


def test_calls_begin_in_the_order_they_are_made() -> None:
    begun: list[int] = []

    async def note(n: int) -> None:
        begun.append(n)

    for future in [start(note(n)) for n in range(50)]:
        future.result()
    assert begun == list(range(50))


def test_only_cancellable_calls_are_cancelled() -> None:
    kept, given_up = start(_value(3, after=0.05)), start(_value(4, after=60), cancellable=True)
    assert not kept.cancel()
    assert given_up.cancel()
    assert kept.result() == 3
    with pytest.raises(concurrent.futures.CancelledError):
        given_up.result()


def test_cancelling_reaches_the_work_itself() -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    future = start(work(), cancellable=True)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.05)

    asyncio.run(give_up())
    assert ended.wait(5)


def test_ctrl_c_interrupts_a_wait() -> None:
    future = start(_value(3, after=60), cancellable=True)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        future.result()
    assert time.monotonic() - before < 30
    future.cancel()


def test_a_failure_nobody_asks_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    asked = start(_failure())
    with pytest.raises(ValueError, match="at fault"):
        asked.result()
    dropped: APIFuture[int] | None = start(_failure())
    while dropped is not None and not dropped.done():
        time.sleep(0.001)
    with caplog.at_level(logging.ERROR, "mint"):
        del asked
        dropped = None
        deadline = time.monotonic() + 5
        while not caplog.records and time.monotonic() < deadline:
            start(_value(1)).result()  # lets the loop drop its own references
    assert [record.getMessage() for record in caplog.records] == [
        "a call failed and nobody asked for its result: ValueError: at fault"
    ]


def test_blocking_in_a_callback_is_refused_not_hung_on() -> None:
    refused: list[BaseException] = []
    slow = start(_value(1, after=0.2))

    def block(_: object) -> None:
        try:
            slow.result()
        except RuntimeError as error:
            refused.append(error)

    start(_value(2, after=0.02)).add_done_callback(block)
    assert slow.result() == 1
    assert "callback" in str(refused[0])


def test_a_result_asked_for_too_early_is_told_to_wait() -> None:
    async def work() -> int:
        return 1

    future = start(work())
    with pytest.raises(AttributeError, match=r"no 'sequences': take its result first, by \.result\(\) or await"):
        future.sequences  # noqa: B018
    assert future.result() == 1 and not hasattr(future, "sequences")
