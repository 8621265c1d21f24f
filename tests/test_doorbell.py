"""Calls from other threads reach an event loop in order, and wake it once for as many as there are."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from mint.doorbell import Doorbell, arriving


class Counted(Doorbell):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.answers = 0

    def _answer(self) -> None:
        self.answers += 1
        super()._answer()


def test_calls_that_come_before_the_loop_looks_wake_it_once_and_keep_their_order() -> None:
    async def work() -> tuple[list[int], int]:
        bell, heard, done = Counted(asyncio.get_running_loop()), [], asyncio.Event()

        def ring() -> None:
            for number in range(100):
                bell.call(lambda number=number: heard.append(number))  # type: ignore[misc]
            bell.call(done.set)

        thread = threading.Thread(target=ring)
        thread.start()
        thread.join()  # the loop has had no chance to look
        await done.wait()
        return heard, bell.answers

    assert asyncio.run(work()) == (list(range(100)), 1)


def test_a_call_that_fails_is_its_own_affair() -> None:
    async def work() -> list[Any]:
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: told.append(type(context["exception"])))
        bell, done = Doorbell(loop), asyncio.Event()

        def ring() -> None:
            bell.call(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
            bell.call(done.set)

        await asyncio.to_thread(ring)
        await done.wait()
        return told

    assert asyncio.run(work()) == [ZeroDivisionError]


def test_nobody_waits_for_a_loop_that_is_closed() -> None:
    loop = asyncio.new_event_loop()
    bell = Doorbell(loop)
    loop.close()
    bell.call(lambda: pytest.fail("nobody can have heard that"))


def test_what_arrives_is_what_came_of_the_work() -> None:
    async def work() -> None:
        good, bad, given_up, unwanted = (Future[int]() for _ in range(4))
        arrived = [arriving(future) for future in (good, bad, given_up, unwanted)]
        arrived[3].cancel()
        await asyncio.to_thread(good.set_result, 3)
        await asyncio.to_thread(bad.set_exception, ValueError("no"))
        await asyncio.to_thread(given_up.cancel)
        assert await arrived[0] == 3
        with pytest.raises(ValueError, match="no"):
            await arrived[1]
        with pytest.raises((CancelledError, asyncio.CancelledError)):
            await arrived[2]
        assert unwanted.cancelled()

    asyncio.run(work())


def test_the_outcome_of_what_nobody_wants_any_more_is_dropped() -> None:
    async def work() -> None:
        late: Future[int] = Future()
        late.set_running_or_notify_cancel()  # too late to be cancelled
        arrived = arriving(late)
        arrived.cancel()
        await asyncio.to_thread(late.set_result, 1)
        await asyncio.sleep(0)
        assert arrived.cancelled()

    asyncio.run(work())


def test_a_loop_that_is_over_is_not_kept() -> None:
    async def work() -> tuple[int, weakref.ref[asyncio.AbstractEventLoop]]:
        done: Future[int] = Future()
        waiting = arriving(done)
        done.set_result(3)
        return await waiting, weakref.ref(asyncio.get_running_loop())

    result, loop = asyncio.run(work())
    gc.collect()
    assert result == 3 and loop() is None
