"""The engine as a backend: order, fairness, isolation, and what happens when something goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mint.engine.runtimes as runtimes_module
from mint.engine.engine import Engine
from mint.engine.lanes import Lanes, Task
from mint.engine.native.training import NativeTraining
from mint.engine.process import make_engine
from mint.engine.tenants import Runtime
from mint.engine.trainer import Trainer
from mint.errors import BadRequest, Internal, NotFound
from mint.types import (
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)
from tests.waiting import PATIENCE, eventually

FAST = AdamParams(learning_rate=0.05)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def base(tiny_folder: Callable[[str], Path]) -> str:
    return str(tiny_folder("qwen3"))


@pytest.fixture
def engine(base: str) -> Iterator[Engine]:
    engine = Engine([base])
    yield engine
    engine.close()


def runtime(engine: Engine) -> Runtime:
    return next(iter(engine._runtimes.loaded.values()))


def datum(tokens: list[int]) -> Datum:
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)})


def ask(n: int = 1, max_tokens: int = 6, prompt: list[int] | None = None) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=3, stop=[])
    return SampleRequest(ModelInput.from_ints(prompt or PROMPT), params, n)


def logprobs(engine: Engine, adapter: str, tokens: list[int]) -> np.ndarray:
    output = engine.forward(adapter, [datum(tokens)], "cross_entropy", {}).result(PATIENCE)
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


def train(engine: Engine, adapter: str, tokens: list[int]) -> None:
    engine.forward_backward(adapter, [datum(tokens)], "cross_entropy", {}).result(PATIENCE)
    engine.optim_step(adapter, FAST).result(PATIENCE)


def created(engine: Engine, base: str, *names: str) -> None:
    for seed, name in enumerate(names):
        engine.create_adapter(name, base, LoraConfig(rank=4, seed=seed)).result(PATIENCE)


def sampled(engine: Engine, policy: str, **options: Any) -> SampledSequence:
    return engine.sample(policy, ask(**options)).result(PATIENCE).sequences[0]


# -------------------------------------------------------------------------------------------- training and sampling


def check_same(a: SampledSequence, b: SampledSequence) -> None:
    """To the last bit but one: the kernels' rounding depends on where in memory the weights happen to lie."""
    assert a.tokens == b.tokens
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=3e-6)  # type: ignore[arg-type]


def test_a_snapshot_samples_the_trained_weights_whatever_is_trained_later(engine: Engine, base: str) -> None:
    created(engine, base, "a")
    engine.load_policy("base", base, None).result(PATIENCE)
    train(engine, "a", [*PROMPT, 1, 2, 3])
    engine.snapshot("a", "p").result(PATIENCE)
    before = sampled(engine, "p")
    np.testing.assert_allclose(before.logprobs, logprobs(engine, "a", [*PROMPT, *before.tokens])[4:], atol=1e-5)
    train(engine, "a", [*PROMPT, 9, 9, 9])
    check_same(sampled(engine, "p"), before)
    assert not np.allclose(before.logprobs, logprobs(engine, "a", [*PROMPT, *before.tokens])[4:], atol=1e-3)
    assert not np.allclose(sampled(engine, "base").logprobs, before.logprobs, atol=1e-3)  # type: ignore[arg-type]


def test_adapters_share_nothing(engine: Engine, base: str) -> None:
    created(engine, base, "a", "b")
    before = logprobs(engine, "b", PROMPT)
    train(engine, "a", PROMPT)
    np.testing.assert_allclose(logprobs(engine, "b", PROMPT), before, atol=3e-6)


def test_calls_that_do_not_wait_give_what_waiting_calls_give(engine: Engine, base: str) -> None:
    """Each adapter's work, its snapshots and their samples come in the order they were asked for."""
    created(engine, base, "slow")
    train(engine, "slow", PROMPT)
    train(engine, "slow", [*PROMPT, 4, 4])
    engine.snapshot("slow", "slow policy").result(PATIENCE)
    futures: list[Future[Any]] = [engine.create_adapter("quick", base, LoraConfig(rank=4, seed=0))]
    for tokens in (PROMPT, [*PROMPT, 4, 4]):
        futures.append(engine.forward_backward("quick", [datum(tokens)], "cross_entropy", {}))
        futures.append(engine.optim_step("quick", FAST))
    futures.append(engine.snapshot("quick", "quick policy"))
    sample = engine.sample("quick policy", ask())
    release = engine.release("quick policy")
    check_same(sample.result(PATIENCE).sequences[0], sampled(engine, "slow policy"))
    wait([*futures, release], PATIENCE)
    assert all(future.exception() is None for future in futures)


def test_a_short_task_of_one_adapter_does_not_wait_for_a_long_one_of_another(
    engine: Engine, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long one takes as many pieces as the others need."""
    created(engine, base, "long", "short")
    others_done, compute = threading.Event(), Trainer.forward_backward

    def lasting(self: Trainer, adapter: Any, data: Any, *args: Any, **more: Any) -> Iterator[Any]:
        while len(data) == 11 and not others_done.is_set():
            yield
        return (yield from compute(self, adapter, data, *args, **more))

    monkeypatch.setattr(Trainer, "forward_backward", lasting)
    long = engine.forward_backward("long", [datum(PROMPT)] * 11, "cross_entropy", {})
    others: list[Future[Any]] = [
        engine.forward_backward("short", [datum(PROMPT)], "cross_entropy", {}),
        engine.optim_step("short", FAST),
        engine.load_policy("base", base, None),
        engine.sample("base", ask(max_tokens=3)),
    ]
    for future in others:
        future.result(PATIENCE)
    assert not long.done()
    others_done.set()
    assert len(long.result(PATIENCE).loss_fn_outputs) == 11


def test_training_goes_on_while_samples_run(engine: Engine, base: str) -> None:
    """The sampler never rests: as soon as a sample ends, another is asked for."""
    created(engine, base, "a")
    runtime(engine).trainer._budget.tokens = 8
    engine.load_policy("base", base, None).result(PATIENCE)
    samples: list[Future[SampleResponse]] = []
    enough = threading.Event()

    def ask_again(_: Future[SampleResponse] | None = None) -> None:
        if not enough.is_set():
            samples.append(engine.sample("base", ask(n=8, max_tokens=20 + len(samples) % 7)))
            samples[-1].add_done_callback(ask_again)

    ask_again()
    ask_again()
    training = engine.forward_backward("a", [datum(PROMPT)] * 3, "cross_entropy", {})
    training.add_done_callback(lambda _: enough.set())
    training.result(PATIENCE)
    assert all(len(sample.result(PATIENCE).sequences) == 8 for sample in samples)


def test_saved_weights_come_back_in_training_and_as_a_policy(engine: Engine, base: str, tmp_path: Path) -> None:
    created(engine, base, "a", "b")
    train(engine, "a", PROMPT)
    folder = str(tmp_path / "checkpoint")
    assert engine.save_adapter("a", folder, optimizer=True).result(PATIENCE) > 0
    engine.load_adapter("b", folder, optimizer=True).result(PATIENCE)
    np.testing.assert_allclose(logprobs(engine, "b", PROMPT), logprobs(engine, "a", PROMPT), atol=1e-6)
    engine.load_policy("saved", base, folder).result(PATIENCE)
    engine.snapshot("a", "live").result(PATIENCE)
    check_same(sampled(engine, "saved"), sampled(engine, "live"))


def test_a_policy_set_again_forgets_what_the_old_one_had_cached(engine: Engine, base: str) -> None:
    created(engine, base, "a")
    engine.snapshot("a", "p").result(PATIENCE)
    prompt = list(range(40))
    engine.sample("p", ask(prompt=prompt)).result(PATIENCE)
    assert engine.sample("p", ask(prompt=prompt)).result(PATIENCE).prompt_cache_hit_tokens == 32
    train(engine, "a", prompt)
    engine.snapshot("a", "p").result(PATIENCE)
    response = engine.sample("p", ask(prompt=prompt)).result(PATIENCE)
    assert response.prompt_cache_hit_tokens == 0
    expected = logprobs(engine, "a", [*prompt, *response.sequences[0].tokens])[39:]
    np.testing.assert_allclose(response.sequences[0].logprobs, expected, atol=1e-5)


# -------------------------------------------------------------------------------------------- when something is wrong


def test_a_bad_request_fails_alone_and_the_adapters_queue_goes_on(engine: Engine, base: str) -> None:
    created(engine, base, "a")
    good = [engine.forward_backward("a", [datum(PROMPT)], "cross_entropy", {})]
    bad = engine.forward_backward("a", [datum([1, 2, 999])], "cross_entropy", {})
    good.append(engine.forward_backward("a", [datum(PROMPT)], "cross_entropy", {}))
    with pytest.raises(BadRequest, match="999"):
        bad.result(PATIENCE)
    losses = [future.result(PATIENCE).metrics["loss:sum"] for future in good]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    engine.load_policy("base", base, None).result(PATIENCE)
    with pytest.raises(BadRequest, match="context"):
        engine.sample("base", ask(max_tokens=1000)).result(PATIENCE)
    assert len(sampled(engine, "base").tokens) == 6


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (RuntimeError("a line\nand another"), "RuntimeError: a line. Its log"),
        (torch.OutOfMemoryError("CUDA out of memory"), "ran out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "ran out of memory"),
    ],
)
def test_a_fault_inside_becomes_one_line_and_the_engine_goes_on(
    engine: Engine, base: str, monkeypatch: pytest.MonkeyPatch, fault: Exception, message: str
) -> None:
    created(engine, base, "a")
    engine.load_policy("base", base, None).result(PATIENCE)

    def broken(*_: Any) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(runtime(engine).model, "hidden", broken)
        patch.setattr(runtime(engine).model, "hidden_of_tree", broken)
        patch.setattr(NativeTraining, "forward", broken)
        patch.setattr(runtime(engine).sampler.runner, "run", broken)
        for future in (engine.forward("a", [datum(PROMPT)], "cross_entropy", {}), engine.sample("base", ask(n=3))):
            with pytest.raises(Internal, match=message) as caught:
                future.result(PATIENCE)
            assert "\n" not in str(caught.value)
    assert len(sampled(engine, "base").tokens) == 6
    train(engine, "a", PROMPT)


def test_unknown_and_doubled_names_are_refused_by_name(engine: Engine, base: str) -> None:
    created(engine, base, "a")
    for future in (
        engine.optim_step("b", FAST),
        engine.snapshot("b", "p"),
        engine.sample("p", ask()),
        engine.load_policy("p", "no/model", None),
        engine.create_adapter("c", "no/model", LoraConfig()),
    ):
        with pytest.raises(NotFound, match=r"'b'|'p'|'no/model'.*qwen3"):
            future.result(PATIENCE)
    with pytest.raises(BadRequest, match="'a'"):
        engine.create_adapter("a", base, LoraConfig()).result(PATIENCE)
    assert engine.models() == [base]


def test_a_cancelled_sample_gives_up_its_place(engine: Engine, base: str) -> None:
    engine.load_policy("base", base, None).result(PATIENCE)
    begun, given_up = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        given_up.wait(PATIENCE)

    future = engine.sample("base", ask(n=4, max_tokens=50), hold)
    assert begun.wait(PATIENCE)
    assert future.cancel()
    given_up.set()
    engine.stats().result(PATIENCE)
    stats = engine.stats().result(PATIENCE)
    assert stats["samples_running"] == stats["samples_waiting"] == stats["kv_blocks_used"] == 0


def test_a_listener_that_fails_disturbs_nobody(engine: Engine, base: str) -> None:
    engine.load_policy("base", base, None).result(PATIENCE)
    response = engine.sample("base", ask(), lambda *_: 1 / 0).result(PATIENCE)  # type: ignore[func-returns-value, arg-type, return-value]
    assert len(response.sequences[0].tokens) == 6


def test_a_released_policy_finishes_what_it_had_begun(engine: Engine, base: str) -> None:
    created(engine, base, "a")
    engine.snapshot("a", "p").result(PATIENCE)
    running = engine.sample("p", ask(max_tokens=40))
    engine.release("p").result(PATIENCE)
    engine.release("never heard of").result(PATIENCE)
    assert len(running.result(PATIENCE).sequences[0].tokens) == 40
    with pytest.raises(NotFound):
        engine.sample("p", ask()).result(PATIENCE)
    engine.release("a").result(PATIENCE)
    with pytest.raises(NotFound):
        engine.optim_step("a", FAST).result(PATIENCE)


def test_closing_fails_what_is_pending_and_everything_later(engine: Engine, base: str) -> None:
    created(engine, base, "a")
    runtime(engine).trainer._budget.tokens = 8
    engine.load_policy("base", base, None).result(PATIENCE)
    begun = threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        eventually(lambda: engine._worker._closed)

    futures: list[Future[Any]] = [engine.sample("base", ask(n=8, max_tokens=50), hold)]
    futures.append(engine.forward("a", [datum(PROMPT)] * 500, "cross_entropy", {}))
    futures.append(engine.optim_step("a", FAST))
    assert begun.wait(PATIENCE)
    engine.close()
    engine.close()
    futures += [engine.stats(), engine.sample("base", ask())]
    for future in futures:
        with pytest.raises(Internal, match="closed"):
            future.result(PATIENCE)


# -------------------------------------------------------------------------------------------- models and figures


def test_an_open_catalogue_loads_on_demand_and_tries_again_after_a_failure(base: str, tmp_path: Path) -> None:
    engine = Engine()
    try:
        later = tmp_path / "later"
        with pytest.raises(NotFound, match="later"):
            engine.load_model(str(later)).result(PATIENCE)
        later.symlink_to(base)
        assert engine.load_model(str(later)).result(PATIENCE).vocab_size == 97
        assert engine.models() == ["mint/tiny", str(later)]
    finally:
        engine.close()


def test_loading_a_model_holds_up_nobody_else(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def load(name: str, device: Any, lean: bool) -> Runtime:
        if name == "slow":
            assert go.wait(PATIENCE)
        return Runtime(base, device, lean)

    engine = Engine()
    try:
        engine.load_policy("base", base, None).result(PATIENCE)
        monkeypatch.setattr(runtimes_module, "Runtime", load)
        waiting = [engine.load_model("slow"), engine.create_adapter("a", "slow", LoraConfig(rank=2))]
        behind = engine.forward("a", [datum(PROMPT)], "cross_entropy", {})
        assert len(sampled(engine, "base").tokens) == 6
        assert not any(future.done() for future in (*waiting, behind))
        go.set()
        wait([*waiting, behind], PATIENCE)
        assert behind.result(PATIENCE).loss_fn_outputs and engine.models() == ["mint/tiny", base, "slow"]
    finally:
        go.set()
        engine.close()


def test_stats_count_what_was_done(engine: Engine, base: str) -> None:
    created(engine, base, "a")
    train(engine, "a", PROMPT)
    engine.snapshot("a", "p").result(PATIENCE)
    sampled(engine, "p", n=2)
    stats = engine.stats().result(PATIENCE)
    assert (stats["models"], stats["adapters"], stats["policies"]) == (1, 1, 1)
    assert (stats["tokens_trained"], stats["tokens_sampled"], stats["tokens_read_by_sampler"]) == (4, 12, 5 + 2 * 5)
    assert stats["kv_blocks_total"] > 0 and stats["kv_bytes"] > 0 and stats["memory_bytes"] > 0
    assert stats["tasks_queued"] == 0


# -------------------------------------------------------------------------------------------- lanes


def steps(log: list[str], name: str, count: int) -> Callable[[], Any]:
    def work() -> Iterator[None]:
        for i in range(count):
            log.append(f"{name}{i}")
            yield

    return work


def test_lanes_take_turns_and_each_keeps_its_order() -> None:
    lanes, log = Lanes(lambda call: call()), []
    for lane, name in (("x", "a"), ("x", "b"), ("y", "c")):
        lanes.add(lane, Task(Future(), steps(log, name, 2), quick=False))
    while lanes.has_work:
        lanes.step()
    assert log == ["a0", "c0", "a1", "c1", "b0", "b1"]


def test_a_lane_that_waits_lets_the_others_pass_and_is_woken() -> None:
    calls: list[Callable[[], None]] = []
    lanes, gate = Lanes(calls.append), Future()
    done: Future[str] = Future()

    def work() -> Iterator[Future[None]]:
        yield gate

    lanes.add("x", Task(Future(), work, quick=True))
    lanes.add("x", Task(done, lambda: "after", quick=True))
    lanes.run_quick()
    assert not lanes.has_work and len(lanes) == 2
    gate.set_result(None)
    for call in calls:
        call()
    lanes.run_quick()
    assert done.result(0) == "after" and len(lanes) == 0


def test_a_task_cancelled_in_the_queue_is_never_done() -> None:
    lanes, log = Lanes(lambda call: call()), []
    future: Future[None] = Future()
    lanes.add("x", Task(future, lambda: log.append("done"), quick=False))
    assert future.cancel()
    lanes.step()
    assert log == [] and not lanes.has_work


def test_a_lean_engine_trains_to_the_same_weights(base: str) -> None:
    found = []
    for lean in (False, True):
        backend = make_engine([base], lean=lean)
        assert isinstance(backend, Engine) and runtime(backend).trainer._lean is lean
        backend.create_adapter("a", base, LoraConfig(rank=2, seed=0)).result(PATIENCE)
        train(backend, "a", PROMPT)
        found.append([p.detach().clone() for p in backend._tenants["a"].adapter.parameters()])
        backend.close()
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))
