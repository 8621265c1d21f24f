"""Micro-batches computed at once on a CPU: cut evenly, and the same to the last bit however many run together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from reference import policy_datum, random_adapter
from test_trainer import assert_gradients, train

from mint.engine import token_budget, trainer
from mint.engine.device import Cores
from mint.engine.model import BaseModel
from mint.engine.planning import plan_evenly, plan_for_cores
from mint.engine.side_by_side import SideBySide
from mint.engine.trainer import Trainer
from mint.errors import BadRequest
from mint.types import Datum, LoraConfig


def on(monkeypatch: pytest.MonkeyPatch, cores: Cores) -> None:
    for module in (token_budget, trainer):
        monkeypatch.setattr(module, "cores", lambda: cores)


def ragged(count: int = 24) -> list[Datum]:
    rng = np.random.default_rng(0)
    return [policy_datum(rng, int(rng.integers(8, 50)), 4) for _ in range(count)]


def test_the_cores_nobody_has_are_lent_and_at_least_one() -> None:
    cores = Cores(3)
    with cores.lend() as all_of_them, cores.lend() as one_too_many:
        assert (all_of_them, one_too_many) == (3, 1)
    with cores.lend(1) as first, cores.lend(5) as rest, cores.lend(1) as more:
        assert (first, rest, more) == (1, 2, 1)
    with pytest.raises(ZeroDivisionError), cores.lend():
        _ = 1 / 0
    with cores.lend() as again:
        assert again == 3


def test_micro_batches_are_about_equally_large_and_hold_every_datum_once() -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.integers(0, 97, length) for length in np.linspace(16, 256, 32).astype(int)]
    total = sum(map(len, sequences))
    for parts in (1, 2, 4, 6):
        batches = plan_evenly(sequences, 2048, lambda tokens, parts=parts: parts)  # type: ignore[misc]
        assert sorted(i for batch in batches for i in batch) == list(range(32))
        sizes = [sum(len(sequences[i]) for i in batch) for batch in batches]
        assert len(sizes) == parts and max(abs(size - total / parts) for size in sizes) <= 16


def test_micro_batches_cost_about_the_same_where_attention_has_its_price() -> None:
    rng = np.random.default_rng(2)
    lengths = [2000, *([100] * 20), *([40] * 50)]
    sequences = [rng.integers(0, 97, length) for length in lengths]
    pair_cost = 1 / 1000

    def costs(batches: list[list[int]]) -> list[float]:
        """Token by token, each with all before it and itself."""
        return [sum(1 + pair_cost * (n + 1) for i in batch for n in range(lengths[i])) for batch in batches]

    by_cost, by_tokens = (costs(plan_for_cores(sequences, 4500, lambda _: {2}, 2, price)) for price in (pair_cost, 0.0))
    assert max(by_cost) - min(by_cost) < 150
    assert max(by_tokens) - min(by_tokens) > 1500, "which is what one core would wait for the other"


def test_no_micro_batch_is_given_more_tokens_than_the_budget_because_they_are_cheap() -> None:
    lengths = [1500, *([50] * 30)]
    sequences = [np.arange(length) + 2000 * n for n, length in enumerate(lengths)]
    batches = plan_for_cores(sequences, 1600, lambda _: {2}, 2, 1 / 100)
    assert [sum(lengths[i] for i in batch) for batch in batches] == [1500, 1500]
    tighter = plan_for_cores(sequences, 1400, lambda _: {2}, 2, 1 / 100)
    assert [sum(lengths[i] for i in batch) for batch in tighter] == [1500] * 2


def test_what_datums_have_in_common_costs_once() -> None:
    shared = np.arange(100)
    group = [np.concatenate([shared, np.full(20, 1000 + n)]) for n in range(4)]
    alone = [np.arange(180) + 5000]
    batches = plan_for_cores([*group, *alone], 400, lambda _: {2}, 2, 1 / 200)
    assert batches == [[4], [0, 1, 2, 3]], "180 tokens each, and the one alone looks at more of them"


def numbered(*lengths: int) -> list[np.ndarray]:
    return [np.arange(length) + 10000 * n for n, length in enumerate(lengths)]


GROUP = [np.concatenate([np.arange(128), np.full(32, 1000 + n)]) for n in range(8)]


@pytest.mark.parametrize(
    ("sequences", "cores", "batches"),
    [
        (numbered(100, 100, 100, 100), 2, 2),
        (numbered(1000), 2, 1),
        (numbered(100, 100, 100), 2, 1),  # 300 / 2 are over before 200
        (numbered(100, 95), 2, 2),
        (GROUP, 2, 1),  # 384 tokens together, 256 in each half
        ([*GROUP, *(sequence + 5000 for sequence in GROUP)], 2, 2),
        (numbered(100, 100, 100), 3, 3),
        (numbered(300, 20, 20), 3, 1),
    ],
)
def test_cores_share_a_micro_batch_where_that_is_over_first(
    sequences: list[np.ndarray], cores: int, batches: int
) -> None:
    found = plan_for_cores(sequences, 2048, lambda _: {1, cores}, cores, 0.0)
    assert len(found) == batches and sorted(i for batch in found for i in batch) == list(range(len(sequences)))


def test_a_call_is_cut_for_all_cores_unless_it_is_small(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, Cores(2))
    budget = token_budget.TokenBudget(tiny_model("qwen3"), lean=False)
    assert budget.lanes == 2
    assert [budget.parts(tokens) for tokens in (1, 200, 256, 4096, 4608, 4609, 9217)] == [1, 1, 2, 2, 2, 4, 6]
    assert [budget.choices(tokens) for tokens in (1, 256, 2048, 4609)] == [{1}, {1, 2}, {1, 2}, {3, 4}]
    assert [budget.sharing(tokens) for tokens in (1, 48, 49, 192, 193, 960)] == [1, 1, 2, 2, 4, 10]
    through_torch = token_budget.TokenBudget(tiny_model("gemma3"), lean=False)
    assert through_torch.choices(256) == {2} and through_torch.sharing(960) == 1
    on(monkeypatch, Cores(1))
    assert token_budget.TokenBudget(tiny_model("qwen3"), lean=False).lanes == 1


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_gradients_are_the_same_bits_with_all_cores_and_with_one_left(
    family: str, tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = Cores(3)
    on(monkeypatch, cores)
    monkeypatch.setattr(token_budget, "FEWEST_SIDE_BY_SIDE", 64)
    model, data = tiny_model(family), ragged()
    together, alone, plain = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(3))
    one = train(Trainer(model), together, data)
    with cores.lend(2):
        other = train(Trainer(model), alone, data)
    assert one.metrics == other.metrics
    assert together.gradients is not None and alone.gradients is not None
    assert all(map(torch.equal, together.gradients, alone.gradients))
    for a, b in zip(one.loss_fn_outputs, other.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(a["logprobs"].to_numpy(), b["logprobs"].to_numpy())
    on(monkeypatch, Cores(1))
    train(Trainer(model), plain, data)
    assert plain.gradients is not None
    assert_gradients(together.gradients, plain.gradients)


def test_a_bad_datum_in_any_micro_batch_leaves_nothing_behind(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, Cores(2))
    monkeypatch.setattr(token_budget, "FEWEST_SIDE_BY_SIDE", 64)
    model, data = tiny_model("llama"), ragged(12)
    shortest = min(data, key=lambda datum: datum.model_input.length)  # so it comes last
    shortest.loss_fn_inputs["advantages"] = type(shortest.loss_fn_inputs["advantages"]).of(
        np.full(shortest.model_input.length, 3e38, np.float32)
    )
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0))
    with pytest.raises(BadRequest):
        train(Trainer(model), adapter, data)
    assert adapter.gradients is None


def test_a_failure_is_told_when_all_have_ended() -> None:
    ended = threading.Event()

    def fails() -> int:
        raise BadRequest("first")

    def works() -> int:
        ended.set()
        return 2

    with pytest.raises(BadRequest, match="first"):
        SideBySide(2)([fails, works])
    assert ended.is_set()
    with pytest.raises(BadRequest, match="first"):
        SideBySide(2)([works, fails])
    assert SideBySide(3)([lambda: 1, works, lambda: 3]) == [1, 2, 3]
