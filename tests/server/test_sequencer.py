import asyncio
from collections.abc import Callable
from itertools import permutations

from mint.server.intervals import Intervals
from mint.server.sequencer import Sequencer
from tests import hourglass

GAP = 0.05


def order_of(script: Callable[[Sequencer, Callable[[int | None], None]], None], wait: float = 0.0) -> list[int | None]:
    """The numbers in the order they were handed on."""

    async def run() -> list[int | None]:
        done: list[int | None] = []
        sequencer = Sequencer(GAP)

        def submit(number: int | None) -> None:
            sequencer.submit(number, lambda: done.append(number))

        script(sequencer, submit)
        await asyncio.sleep(wait)
        return done

    return hourglass.run(run())


def test_any_order_of_arrival_is_handed_on_in_order_at_once() -> None:
    for arrival in permutations([1, 2, 3, 4]):
        assert order_of(lambda _, submit, arrival=arrival: [submit(n) for n in arrival]) == [1, 2, 3, 4]


def test_a_number_that_never_comes_is_given_up_after_the_gap() -> None:
    assert order_of(lambda _, submit: [submit(n) for n in (1, 3, 4)]) == [1]
    assert order_of(lambda _, submit: [submit(n) for n in (1, 3, 4)], wait=3 * GAP) == [1, 3, 4]


def test_two_gaps_are_each_waited_for() -> None:
    assert order_of(lambda _, submit: [submit(n) for n in (2, 4)], wait=1.5 * GAP) == [2]
    assert order_of(lambda _, submit: [submit(n) for n in (2, 4)], wait=4 * GAP) == [2, 4]


def test_a_steady_stream_does_not_put_off_the_end_of_the_wait() -> None:
    async def run() -> list[int]:
        done: list[int] = []
        sequencer = Sequencer(GAP)
        for number in range(2, 12):
            sequencer.submit(number, lambda number=number: done.append(number))
            await asyncio.sleep(GAP / 2)
        return done

    assert hourglass.run(run())[:3] == [2, 3, 4]


def test_a_refused_number_is_not_waited_for() -> None:
    def script(sequencer: Sequencer, submit: Callable[[int | None], None]) -> None:
        submit(2)
        sequencer.skip(1)

    assert order_of(script) == [2]


def test_refusing_a_number_that_is_waiting_does_not_drop_it() -> None:
    def script(sequencer: Sequencer, submit: Callable[[int | None], None]) -> None:
        submit(2)
        sequencer.skip(2)
        submit(1)

    assert order_of(script) == [1, 2]


def test_a_late_number_and_no_number_run_at_once() -> None:
    def script(sequencer: Sequencer, submit: Callable[[int | None], None]) -> None:
        for number in (1, 2, 4, None):
            submit(number)
        submit(2)

    assert order_of(script) == [1, 2, None, 2]


def test_a_sequencer_continues_another_from_its_next_number_and_what_it_handled() -> None:
    async def run() -> tuple[list[int], list[bool]]:
        done: list[int] = []
        first = Sequencer(60, on_gap=lambda _: None)
        for number in (1, 3):
            first.submit(number, lambda: None)
        first.jump(3)
        second = Sequencer(60, following=first.following, handled=first.handled.runs)
        seen = [second.seen(number) for number in (1, 2, 3, 4)]
        for number in (4, 2):
            second.submit(number, lambda number=number: done.append(number))
        return done, seen

    assert hourglass.run(run()) == ([4, 2], [True, False, True, False])


def test_a_jump_by_billions_costs_nothing() -> None:
    assert order_of(lambda _, submit: [submit(n) for n in (1, 2**62, 2**62 - 1)], wait=3 * GAP) == [1, 2**62 - 1, 2**62]


def test_intervals_are_a_set() -> None:
    numbers = [5, 1, 3, 2, 9, 4, 8, 5, 10, 6]
    kept, known = Intervals(), set()
    for number in numbers:
        kept.add(number)
        known.add(number)
        assert [n in kept for n in range(12)] == [n in known for n in range(12)]
    assert kept.runs == [[1, 6], [8, 10]]
