"""A policy whose samples would not come from the trained weights is refused, by name; one that is right never is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES

from mint.engine.engine import Engine
from mint.engine.lora import Adapter
from mint.engine.sampler.drawing import Drawn
from mint.engine.sampler.runner import Runner
from mint.engine.sampler.scheduler import Plan
from mint.engine.tenants import Policy
from mint.engine.verify import effect
from mint.errors import Internal
from mint.types import AdamParams, Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams
from tests.waiting import PATIENCE

TEXT = [5, 6, 7, 8, 9, 11]
QUESTION = SampleRequest(ModelInput.from_ints(TEXT), SamplingParams(max_tokens=3, seed=0, stop=[]))


@pytest.fixture
def engine(tiny_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Engine]:
    base = str(tiny_folder(getattr(request, "param", "qwen3")))
    engine = Engine([base])
    for seed, name in enumerate(("a", "b")):
        engine.create_adapter(name, base, LoraConfig(rank=4, seed=seed)).result(PATIENCE)
    yield engine
    engine.close()


def train(engine: Engine, adapter: str, rate: float = 1e-3) -> dict[str, float]:
    weight = 1.0 if adapter == "a" else -1.0
    inputs = {"target_tokens": TEXT[1:], "weights": [weight] * (len(TEXT) - 1)}
    engine.forward_backward(adapter, [Datum(ModelInput.from_ints(TEXT[:-1]), inputs)], "cross_entropy", {})
    return engine.optim_step(adapter, AdamParams(learning_rate=rate)).result(PATIENCE)


def serve(engine: Engine, adapter: str = "a", policy: str = "p") -> None:
    engine.snapshot(adapter, policy).result(PATIENCE)
    engine.sample(policy, QUESTION).result(PATIENCE)


def exchange(engine: Engine, policy: str, adapter: Adapter | None) -> None:
    """From now on the sampler is given other weights than those that were to be served."""
    engine._worker.submit(policy, lambda: _exchange(engine, policy, adapter)).result(PATIENCE)


def _exchange(engine: Engine, policy: str, adapter: Adapter | None) -> None:
    held: Policy = engine._policies.by_name[policy]
    engine._policies.by_name[policy] = replace(held, adapter=adapter)


def served(engine: Engine, policy: str) -> Adapter:
    adapter = engine._policies.by_name[policy].adapter
    assert adapter is not None
    return adapter


def refused(engine: Engine, policy: str = "p") -> str:
    with pytest.raises(Internal, match="policy refused") as first:
        engine.sample(policy, QUESTION).result(PATIENCE)
    with pytest.raises(Internal, match="policy refused"):
        engine.sample(policy, QUESTION).result(PATIENCE)
    return str(first.value)


# ------------------------------------------------------------------------------------------------ clean runs


@pytest.mark.parametrize("engine", FAMILIES, indirect=True)
def test_a_right_policy_is_served_however_far_it_has_come_and_the_figures_travel(engine: Engine) -> None:
    serve(engine)
    assert "policy/version" in train(engine, "a", 1e-9)
    for rate in (1e-9, 1e-6, 1e-4, 1e-3, 1e-2):
        serve(engine)
        metrics = train(engine, "a", rate)
    assert metrics["policy/version"] == 5
    assert 0 <= metrics["policy/logprob_gap_mean"] <= metrics["policy/logprob_gap_max"] < 1e-4
    serve(engine)
    assert train(engine, "a")["policy/distance_from_base"] > metrics["policy/distance_from_base"] > 0
    engine.load_policy("base", engine.models()[0], None).result(PATIENCE)
    engine.sample("base", QUESTION).result(PATIENCE)


def test_a_snapshot_that_is_not_sampled_costs_no_pass_and_later_ones_do_not_mind(engine: Engine) -> None:
    train(engine, "a")
    for n in range(3):
        engine.snapshot("a", f"p{n}").result(PATIENCE)
        assert "policy/version" not in train(engine, "a")
    for n in (2, 0, 1):
        engine.sample(f"p{n}", QUESTION).result(PATIENCE)
    assert train(engine, "a")["policy/version"] == 3, "the newest, in whatever order they were asked"


def test_a_saved_policy_is_proved_when_it_is_loaded(engine: Engine, tmp_path: Path) -> None:
    train(engine, "a")
    engine.save_adapter("a", str(tmp_path / "saved"), False).result(PATIENCE)
    for name in ("good", "bad"):
        engine.load_policy(name, engine.models()[0], str(tmp_path / "saved")).result(PATIENCE)
    engine.sample("good", QUESTION).result(PATIENCE)
    exchange(engine, "bad", None)
    assert "the base model's weights" in refused(engine, "bad")


def test_going_back_to_a_checkpoint_is_not_called_stale(engine: Engine, tmp_path: Path) -> None:
    train(engine, "a")
    engine.save_adapter("a", str(tmp_path / "saved"), True).result(PATIENCE)
    serve(engine)
    for _ in range(2):
        train(engine, "a")
        serve(engine)
        engine.load_adapter("a", str(tmp_path / "saved"), True).result(PATIENCE)
        serve(engine)


# ------------------------------------------------------------------------------------------------ planted faults


def test_the_base_model_in_place_of_the_policy_is_named(engine: Engine) -> None:
    train(engine, "a", 1e-5)
    engine.snapshot("a", "p").result(PATIENCE)
    exchange(engine, "p", None)
    assert "the sampler has the base model's weights" in refused(engine)


def test_a_stale_policy_is_named(engine: Engine) -> None:
    train(engine, "a")
    serve(engine)
    old = served(engine, "p")
    train(engine, "a", 1e-5)
    engine.snapshot("a", "p").result(PATIENCE)
    exchange(engine, "p", old)
    assert "the sampler has the weights of an earlier snapshot" in refused(engine)


def test_a_snapshot_that_copies_the_wrong_weights_is_refused_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(engine, "a")
    old = engine._tenants["a"].adapter.snapshot()
    train(engine, "a", 1e-7)
    monkeypatch.setattr(Adapter, "snapshot", lambda self, dtype=None: old)
    with pytest.raises(Internal, match=r"weights of \S+proj are not those of the adapter in training"):
        engine.snapshot("a", "p").result(PATIENCE)


@pytest.mark.parametrize("fault", ["scale", "rows of another tenant", "the other half", "another tenant"])
def test_other_weights_than_those_trained_are_named_with_the_figures(engine: Engine, fault: str) -> None:
    for _ in range(2):
        train(engine, "a", 1e-2), train(engine, "b", 1e-2)
    engine.snapshot("a", "p").result(PATIENCE)
    wrong = engine._tenants["a"].adapter.snapshot()
    other = engine._tenants["b"].adapter
    if fault == "scale":
        wrong.scale /= 2
    elif fault == "rows of another tenant":
        for path, (_, up) in wrong.weights.items():
            up[::2] = other.weights[path][1].detach()[::2]
    elif fault == "the other half":
        wrong.weights = dict(list(wrong.weights.items())[::2])
    else:
        wrong = other.snapshot()
    exchange(engine, "p", wrong)
    assert "sampler and trainer disagree. Over 21 tokens" in refused(engine)


def test_a_corrupt_cache_is_noticed_by_what_is_read_from_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    train(engine, "a")
    run = Runner.run

    def garbled(self: Runner, plan: Plan) -> list[Drawn]:
        for values in self.store.values:
            values.copy_(values.roll(1, -1))
        return run(self, plan)

    monkeypatch.setattr(Runner, "run", garbled)
    engine.snapshot("a", "p").result(PATIENCE)
    assert "sampler and trainer disagree" in refused(engine)


def test_an_adapter_that_neither_path_applies_is_named(engine: Engine) -> None:
    train(engine, "a")
    adapter = engine._tenants["a"].adapter
    assert effect(adapter) > 1e-3
    unapplied = adapter.snapshot()
    unapplied.weights = {f"nowhere.{path}": pair for path, pair in unapplied.weights.items()}
    engine.snapshot("a", "p").result(PATIENCE)
    held = engine._policies.by_name["p"]
    held.proof.weights = unapplied
    exchange(engine, "p", unapplied)
    assert "to the last bit although its adapter is not empty" in refused(engine)


def test_a_failing_step_of_the_sampler_is_no_verdict(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    train(engine, "a")
    engine.snapshot("a", "p").result(PATIENCE)
    sampler = engine._policies.by_name["p"].runtime.sampler
    run, failures = sampler.runner.run, iter([True])

    def stumbling(plan: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("a cosmic ray")
        return run(plan)

    monkeypatch.setattr(sampler.runner, "run", stumbling)
    answers = [engine.sample("p", QUESTION) for _ in range(2)]
    assert any(answer.exception(PATIENCE) for answer in answers), "what ran in that step fails with it"
    assert engine.sample("p", QUESTION).result(PATIENCE).sequences[0].tokens


def test_a_policy_that_diverged_is_told_apart_from_a_wrong_one(engine: Engine) -> None:
    train(engine, "a")
    with torch.no_grad():
        next(iter(engine._tenants["a"].adapter.weights.values()))[1].fill_(np.nan)
    engine.snapshot("a", "p").result(PATIENCE)
    with pytest.raises(Internal, match="diverged"):
        engine.sample("p", QUESTION).result(PATIENCE)


def test_weights_too_large_for_rounding_are_laid_to_the_training_and_not_to_the_engine(engine: Engine) -> None:
    """As a learning rate of 1000 leaves them. What the two paths then differ by is planted: rounding is not a given."""
    train(engine, "a", 300.0)
    engine.snapshot("a", "p").result(PATIENCE)
    with torch.no_grad():
        for _, up in served(engine, "p").weights.values():
            up.mul_(0.9)
    said = refused(engine)
    assert "training has diverged" in said and "Lower the learning rate" in said and "report" not in said
