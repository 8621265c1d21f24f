"""How the engine's thread divides its time."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from mint.engine import worker as worker_module
from mint.engine.lanes import Lanes, Task
from mint.engine.worker import Worker


class Sampling:
    """A sampler that has work until it is told otherwise."""

    has_work = False

    def __init__(self) -> None:
        self.stepped = threading.Event()

    def step(self) -> None:
        self.stepped.set()

    def settle(self) -> None:
        """There is never a step under way."""

    def abort(self, error: Exception, everything: bool = False) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("sampling", [True, False])
def test_what_training_gave_a_gpu_to_do_counts_as_its_time_where_somebody_samples(
    monkeypatch: pytest.MonkeyPatch, sampling: bool
) -> None:
    waited: list[bool] = []
    monkeypatch.setattr(worker_module, "wait_for_gpu", lambda: waited.append(True))
    sampler = Sampling()
    worker = Worker(lambda: [sampler] if sampling else [])  # type: ignore[list-item]

    def start() -> None:
        sampler.has_work = sampling

    try:
        worker.call_soon(start)
        assert worker.submit("lane", lambda: "done").result(30) == "done"
        if sampling:
            assert sampler.stepped.wait(30)
        sampler.has_work = False
    finally:
        worker.call_soon(lambda: None)
        sampler.abort = lambda *_, **__: None  # type: ignore[method-assign,assignment]
        worker.close()
    assert waited == [True] * sampling


def test_short_pieces_of_training_go_on_for_the_time_of_a_samplers_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of them would cost whoever trains a step of those who sample."""
    sampler, now = Sampling(), 0.0
    turns: list[str] = []
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(perf_counter=lambda: now))

    def spend(turn: str, seconds: float) -> None:
        nonlocal now
        turns.append(turn)
        now += seconds

    sampler.step = lambda: spend("sample", 1.0)  # type: ignore[method-assign]
    worker = Worker(lambda: [sampler])  # type: ignore[list-item]

    def pieces() -> Generator[None, None, None]:
        for _ in range(12):
            spend("train", 0.11)
            yield

    try:
        sampler.has_work = True
        worker.submit("lane", pieces).result(30)
        sampler.has_work = False
    finally:
        sampler.abort = lambda *_, **__: None  # type: ignore[method-assign,assignment]
        worker.close()
    trained = [n for n, turn in enumerate(turns) if turn == "train"]
    between = turns[trained[0] : trained[-1]].count("sample")
    assert (len(trained), between) == (12, 3), turns  # after the first one, and twice after ten that took 1.1


def test_who_comes_while_a_lane_has_its_turn_is_next() -> None:
    lanes, turns = Lanes(lambda call: call()), ""

    def pieces(name: str) -> Generator[None, None, None]:
        nonlocal turns
        for _ in range(2):
            turns += name
            yield

    def add(name: str) -> None:
        lanes.add(name, Task(Future(), lambda: pieces(name), quick=False))

    add("a")
    lanes.step()
    add("b")
    assert len(lanes) == 2
    while lanes.has_work:
        lanes.step()
    assert turns == "abab"
