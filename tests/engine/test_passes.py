"""Training beside the worker: tenants at once, each in its own order and to the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

import mint.engine.passes as passes_module
from mint.engine.engine import Engine
from mint.engine.passes import Passes
from mint.engine.tenants import Runtime
from mint.engine.trainer import Trainer
from mint.errors import BadRequest
from mint.types import AdamParams, Datum, ForwardBackwardOutput, LoraConfig, ModelInput
from tests.waiting import PATIENCE

FAST = AdamParams(learning_rate=0.05)


def data(seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(5, 60, size=int(n)).tolist() for n in rng.integers(8, 40, size=6)]
    return [
        Datum(ModelInput.from_ints(r[:-1]), {"target_tokens": r[1:], "weights": [1.0] * (len(r) - 1)}) for r in rows
    ]


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(passes_module, "_cores_with_memory", lambda: 2)


@pytest.fixture
def base(tiny_folder: Callable[[str], Path]) -> str:
    return str(tiny_folder("qwen3"))


def meeting(monkeypatch: pytest.MonkeyPatch, parties: int) -> None:
    """Every pass waits, in its first piece, until so many are there."""
    barrier, compute = threading.Barrier(parties), Trainer.forward_backward

    def wait_and_compute(self: Trainer, *args: object) -> Generator[None, None, ForwardBackwardOutput]:
        barrier.wait(PATIENCE)
        return (yield from compute(self, *args))  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "forward_backward", wait_and_compute)


@pytest.mark.usefixtures("two_cores")
def test_passes_of_two_tenants_run_at_the_same_time(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine([base])
    for name in "ab":
        engine.create_adapter(name, base, LoraConfig(rank=4, seed=1)).result(PATIENCE)
    meeting(monkeypatch, 2)
    both = [engine.forward_backward(name, data(0), "cross_entropy", {}) for name in "ab"]
    first, second = (future.result(PATIENCE).metrics["loss:sum"] for future in both)
    engine.close()
    assert first == second


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_weights_in_company_are_those_of_training_alone_to_the_last_bit(
    tiny_folder: Callable[[str], Path], family: str
) -> None:
    base = str(tiny_folder(family))

    def trained(names: str) -> dict[str, list[bytes]]:
        engine = Engine([base])
        for name in names:
            engine.create_adapter(name, base, LoraConfig(rank=4, seed=1)).result(PATIENCE)
        for step in range(3):
            for name in names:  # nothing is waited for in between
                engine.forward_backward(name, data(step + ord(name)), "cross_entropy", {})
                last = engine.optim_step(name, FAST)
        for name in names:
            last = engine.forward(name, data(9), "cross_entropy", {})
            last.result(PATIENCE)
        weights = {n: [p.detach().numpy().tobytes() for p in engine._tenants[n].adapter.parameters()] for n in names}
        engine.close()
        return weights

    together = trained("abc")
    assert together == trained("a") | trained("b") | trained("c")
    assert together["a"] != together["b"]


def test_a_refused_pass_fails_alone(base: str, two_cores: None) -> None:
    engine = Engine([base])
    engine.create_adapter("a", base, LoraConfig(rank=4, seed=1)).result(PATIENCE)
    bad = engine.forward_backward("a", data(0), "cross_entropy", {"no_such_option": 1.0})
    good = engine.forward_backward("a", data(0), "cross_entropy", {})
    with pytest.raises(BadRequest, match="no_such_option"):
        bad.result(PATIENCE)
    assert good.result(PATIENCE).metrics["tokens:sum"] > 0
    engine.close()


def test_training_that_may_not_run_beside_the_worker_runs_on_it(
    base: str, two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    compute = Trainer.forward_backward

    def noted(self: Trainer, *args: object) -> Generator[None, None, ForwardBackwardOutput]:
        threads.append(threading.current_thread().name)
        return (yield from compute(self, *args))  # type: ignore[arg-type]

    engine = Engine([base])
    engine.create_adapter("a", base, LoraConfig(rank=4, seed=1)).result(PATIENCE)
    monkeypatch.setattr(Trainer, "forward_backward", noted)
    engine.forward_backward("a", data(0), "cross_entropy", {}).result(PATIENCE)
    engine._passes = Passes(lambda: False, threads=2)
    engine.forward_backward("a", data(0), "cross_entropy", {}).result(PATIENCE)
    engine.close()
    assert threads[0].startswith("mint-pass")
    assert threads[1] == "mint-engine"


def test_only_narrow_models_on_a_cpu_compute_beside_the_worker(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    engine = Engine([base])
    assert engine._runtimes.are_narrow()
    runtime: Runtime = engine._runtimes.loaded[base]
    runtime.model.hidden_size = 4096
    monkeypatch.setattr("mint.engine.device._physical_cores", lambda: 2)
    assert not engine._runtimes.are_narrow()
    engine.close()
