"""How the engine's thread divides its time."""

from __future__ import annotations

import threading

import pytest

from mint.engine import worker as worker_module
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
