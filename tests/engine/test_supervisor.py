"""An engine that is started again when it dies: which calls notice, and which do not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import fake_backend
import pytest

from mint.engine.supervised import SupervisedEngine
from mint.errors import Internal, Interrupted
from mint.types import ModelInput, SampleRequest
from tests.waiting import PATIENCE, eventually


@pytest.fixture
def engine() -> Iterator[SupervisedEngine]:
    engine = SupervisedEngine(make=fake_backend.make)
    yield engine
    engine.close()


def kill(engine: SupervisedEngine) -> None:
    before = engine.generation
    os.kill(engine.pid, signal.SIGKILL)
    assert eventually(lambda: engine.generation > before)


def test_a_killed_engine_is_followed_by_another(engine: SupervisedEngine) -> None:
    first = engine.stats().result(PATIENCE)["pid"]
    kill(engine)
    assert engine.generation == 1
    assert engine.stats().result(PATIENCE)["pid"] != first


def test_work_under_way_is_interrupted_and_calls_that_need_nothing_are_made_again(engine: SupervisedEngine) -> None:
    begun = threading.Event()
    engine.stats().result(PATIENCE)
    sample = engine.sample("endless", SampleRequest(ModelInput.from_ints([1])), lambda *_: begun.set())
    assert begun.wait(PATIENCE)
    kill(engine)
    with pytest.raises(Interrupted, match="SIGKILL"):
        sample.result(PATIENCE)
    assert engine.stats().result(PATIENCE)["pid"] == engine.pid


def test_a_call_that_kills_each_engine_is_not_made_for_ever(engine: SupervisedEngine) -> None:
    engine.stats().result(PATIENCE)
    with pytest.raises(Interrupted, match="exit code 7"):
        engine.load_model("crash").result(PATIENCE)
    assert eventually(lambda: engine.generation == 3)
    assert engine.stats().result(PATIENCE)["pid"] == engine.pid


def test_a_first_engine_that_cannot_start_is_told_and_not_tried_again() -> None:
    told: list[int] = []
    engine = SupervisedEngine(on_failure=told.append, make=fake_backend.die)
    with pytest.raises(Internal):
        engine.stats().result(PATIENCE)
    assert eventually(lambda: told == [9])
    assert engine.generation == 0
    assert not engine.usable
    engine.close()


def test_a_later_engine_that_cannot_start_is_tried_again(tmp_path: Path) -> None:
    """Nothing that waits for the engine fails because the device was away for a moment."""
    os.environ["FAKE_BACKEND_TROUBLE"] = str(tmp_path / "trouble")
    try:
        engine = SupervisedEngine(make=fake_backend.make_unless_trouble)
        engine.stats().result(PATIENCE)
        (tmp_path / "trouble").touch()
        kill(engine)
        with pytest.raises(Interrupted):
            engine.forward("a", [], "ppo", {}).result(PATIENCE)
        assert eventually(lambda: engine.generation >= 2)
        (tmp_path / "trouble").unlink()
        assert eventually(lambda: engine.stats().exception(PATIENCE) is None)
        engine.close()
    finally:
        del os.environ["FAKE_BACKEND_TROUBLE"]


def test_closing_ends_it_for_good(engine: SupervisedEngine) -> None:
    engine.stats().result(PATIENCE)
    pid = engine.pid
    engine.close()
    assert engine.generation == 0
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(Interrupted):
        engine.stats().result(PATIENCE)


def test_an_engine_killed_while_it_starts_is_started_again() -> None:
    engine = SupervisedEngine(make=fake_backend.make)
    os.kill(engine.pid, signal.SIGKILL)
    assert eventually(lambda: engine.generation == 1)
    assert engine.stats().result(PATIENCE)["pid"] == engine.pid
    engine.close()
