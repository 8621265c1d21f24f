"""The engine in a child process: what crosses the pipe, and who outlives whom."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_backend
import numpy as np
import pytest

from mint.engine.process import EngineProcess
from mint.engine.spawn import start_child
from mint.errors import BadRequest, Internal
from mint.types import Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams, TensorData
from tests.waiting import PATIENCE, eventually, is_gone

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    engine = EngineProcess(make=fake_backend.make)
    yield engine
    engine.close()


def ask() -> SampleRequest:
    return SampleRequest(ModelInput.from_ints([1, 2]))


# ------------------------------------------------------------------------------------------------- what crosses


def test_values_errors_and_large_arrays_cross_the_pipe(engine: EngineProcess) -> None:
    datum = Datum(ModelInput.from_ints([1]), {"logprobs": TensorData.of(fake_backend.BIG)})
    output = engine.forward("a", [datum], "ppo", {"x": 0.5}).result(PATIENCE)
    np.testing.assert_array_equal(output.loss_fn_outputs[0]["logprobs"].to_numpy(), 2 * fake_backend.BIG)
    assert output.metrics == {"config": 0.5}
    with pytest.raises(BadRequest, match="so bad"):
        engine.release("bad").result(PATIENCE)
    with pytest.raises(Internal, match="ZeroDivisionError: zero"):
        engine.release("worse").result(PATIENCE)
    with pytest.raises(Internal, match="at once"):
        engine.load_model("raise").result(PATIENCE)


def test_tokens_are_heard_before_the_end_and_a_failing_listener_disturbs_nobody(engine: EngineProcess) -> None:
    heard: list[tuple[Any, ...]] = []
    future = engine.sample("p", ask(), lambda *tokens: heard.append(tokens))
    assert future.result(PATIENCE).sequences[0].tokens == [0, 1, 2]
    assert heard == [(0, [0], [0.0]), (0, [1], [-1.0]), (0, [2], [-2.0])]
    assert engine.sample("p", ask(), lambda *_: 1 / 0).result(PATIENCE)  # type: ignore[arg-type, return-value]


def test_cancelling_a_sample_cancels_it_in_the_child(engine: EngineProcess) -> None:
    begun = threading.Event()
    future = engine.sample("endless", ask(), lambda *_: begun.set())
    assert begun.wait(PATIENCE)
    assert future.cancel()
    assert engine.stats().result(PATIENCE)["cancelled"] == 1


def test_calls_from_many_threads_all_get_their_own_answer(engine: EngineProcess) -> None:
    answers: dict[int, float] = {}

    def call(i: int) -> None:
        datum = Datum(ModelInput.from_ints([1]), {"logprobs": TensorData.of([float(i)])})
        output = engine.forward("a", [datum], "ppo", {"x": 0.0}).result(PATIENCE)
        answers[i] = output.loss_fn_outputs[0]["logprobs"].to_numpy()[0]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == {i: 2.0 * i for i in range(20)}


def test_what_cannot_be_pickled_fails_at_the_caller_and_nowhere_else(engine: EngineProcess) -> None:
    with pytest.raises((AttributeError, TypeError)):
        engine.load_model(threading.Lock())  # type: ignore[arg-type]
    assert engine.stats().result(PATIENCE)


def test_the_parents_side_imports_no_torch() -> None:
    script = (
        "import sys, fake_backend, mint.engine, mint.engine.process as p\n"
        "engine = mint.engine.EngineProcess(make=fake_backend.make)\n"
        "engine.stats().result(60)\n"
        "engine.close()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=PATIENCE)


# ------------------------------------------------------------------------------------------------- who outlives whom


def test_when_the_child_dies_everything_pending_fails_and_says_how() -> None:
    codes: list[int] = []
    engine = EngineProcess(make=fake_backend.make, on_exit=codes.append)
    pending = [engine.load_model("never"), engine.sample("endless", ask())]
    engine.ready.result(PATIENCE)
    assert engine.alive
    os.kill(engine.pid, signal.SIGKILL)
    for future in pending:
        with pytest.raises(Internal, match=r"died \(exit code -9: killed by SIGKILL\)"):
            future.result(PATIENCE)
    assert eventually(lambda: codes == [-9]) and not engine.alive
    with pytest.raises(Internal, match="SIGKILL"):
        engine.stats().result(0)
    engine.close()


def test_an_exit_code_is_told() -> None:
    engine = EngineProcess(make=fake_backend.make)
    with pytest.raises(Internal, match="exit code 7"):
        engine.load_model("crash").result(PATIENCE)
    engine.close()


def test_an_engine_that_cannot_be_made_says_why_to_every_call() -> None:
    engine = EngineProcess(["x"], make=fake_backend.make_failing)
    for future in (engine.ready, engine.stats(), engine.sample("p", ask())):
        with pytest.raises(BadRequest, match=r"cannot make \['x'\]"):
            future.result(PATIENCE)
    assert engine.models() == ["x"]
    engine.close()


def test_closing_ends_a_busy_child_fails_what_is_pending_and_may_be_repeated() -> None:
    codes: list[int] = []
    engine = EngineProcess(make=fake_backend.make_slowly, on_exit=codes.append)
    future = engine.stats()
    engine.close()
    engine.close()
    assert is_gone(engine.pid) and codes == []
    with pytest.raises(Internal, match="closed"):
        future.result(0)
    with pytest.raises(Internal, match="closed"):
        engine.stats().result(0)


@pytest.mark.parametrize("make", ["make", "make_without_kernel_help"])
def test_the_child_dies_with_a_parent_killed_outright(make: str) -> None:
    script = (
        "import time, fake_backend, mint.engine.process as p\n"
        f"engine = p.EngineProcess(make=fake_backend.{make})\n"
        "engine.ready.result(60)\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not is_gone(child)
    parent.kill()
    parent.wait(PATIENCE)
    assert eventually(lambda: is_gone(child))


def test_the_child_outlives_the_thread_that_asked_for_it() -> None:
    engines: list[EngineProcess] = []
    thread = threading.Thread(target=lambda: engines.append(EngineProcess(make=fake_backend.make)))
    thread.start()
    thread.join(PATIENCE)
    engines[0].ready.result(PATIENCE)
    assert engines[0].stats().result(PATIENCE)["pid"] == engines[0].pid
    engines[0].close()


def test_ctrl_c_is_for_the_parent_alone(engine: EngineProcess) -> None:
    stats = engine.stats().result(PATIENCE)
    assert stats["group"] != os.getpgrp(), "the terminal would send Ctrl-C to the child as well"
    os.kill(engine.pid, signal.SIGINT)
    assert engine.stats().result(PATIENCE)["pid"] == engine.pid


# ------------------------------------------------------------------------------------------------- the real thing


def test_a_real_engine_trains_and_samples_in_the_child(tiny_folder: Callable[[str], Path]) -> None:
    base = str(tiny_folder("llama"))
    engine = EngineProcess()
    try:
        assert engine.load_model(base).result(PATIENCE).vocab_size == 97
        assert engine.models() == ["mint/tiny", base]
        engine.create_adapter("a", base, LoraConfig(rank=2, seed=0))
        engine.snapshot("a", "p")
        request = SampleRequest(ModelInput.from_ints([5, 6, 7]), SamplingParams(max_tokens=5, seed=1, stop=[]), 2)
        (first, second) = engine.sample("p", request).result(PATIENCE).sequences
        assert first.tokens != second.tokens
        full = [5, 6, 7, *first.tokens]
        datum = Datum(ModelInput.from_ints(full[:-1]), {"target_tokens": full[1:], "weights": [1.0] * 7})
        output = engine.forward("a", [datum], "cross_entropy", {}).result(PATIENCE)
        np.testing.assert_allclose(first.logprobs, output.loss_fn_outputs[0]["logprobs"].to_numpy()[2:], atol=1e-5)
    finally:
        engine.close()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}


# ------------------------------------------------------------------------------------------------- started beforehand


def test_a_child_that_was_started_before_its_engine_was_asked_for_is_that_engines() -> None:
    child = start_child(["fake_backend", "there_is_no_such_module"])
    engine = EngineProcess(make=fake_backend.make, child=child)
    assert engine.stats().result(PATIENCE)["pid"] == child.process.pid == engine.pid
    engine.close()
    assert child.process.returncode == 0


def test_calls_an_event_loop_makes_in_one_go_leave_together_and_in_order(engine: EngineProcess) -> None:
    engine.ready.result(PATIENCE)
    sent: list[int] = []
    send = engine._child.pipe.send

    def count(messages: Sequence[bytes]) -> None:
        sent.append(len(messages))
        send(messages)

    engine._child.pipe.send = count  # type: ignore[method-assign]

    async def ask_thrice() -> list[float]:
        def doubled(number: float) -> Any:
            datum = Datum(ModelInput.from_ints([1]), {"logprobs": TensorData.of([number])})
            return asyncio.wrap_future(engine.forward("a", [datum], "ppo", {"x": number}))

        return [output.metrics["config"] for output in await asyncio.gather(*map(doubled, (1.0, 2.0, 3.0)))]

    assert asyncio.run(ask_thrice()) == [1.0, 2.0, 3.0]
    assert sent == [3]
    assert engine.stats().result(PATIENCE) and sent == [3, 1]  # from a thread without a loop, at once
