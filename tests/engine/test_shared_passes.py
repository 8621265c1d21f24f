"""Tenants whose micro-batches share a pass get what each would have got alone, and nobody pays for another's faults.

On a CPU the kernels are written out (`plain_owned_rows`), as flash attention and recordings are (`test_pass_graphs`);
the real ones: `test_shared_passes_on_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import plain_owned_rows  # noqa: F401  (makes the operators known)
import pytest
import torch
from reference import group_data, random_adapter
from test_pass_graphs import OPTIONS, PLENTY, Again, assert_same, on_a_gpu
from test_trainer import assert_gradients, policy_data, train

from mint.engine import shared_passes
from mint.engine.batch import Part, pack, read_data
from mint.engine.device import Cores
from mint.engine.lora import Adapter
from mint.engine.losses import LOSSES
from mint.engine.model import BaseModel
from mint.engine.pass_graphs import PassGraphs
from mint.engine.trainer import Trainer
from mint.errors import BadRequest
from mint.types import Datum, ForwardBackwardOutput, LoraConfig

Call = Generator[None, None, ForwardBackwardOutput]


@pytest.fixture
def model(tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch) -> BaseModel:
    model = tiny_model("qwen3")
    on_a_gpu(model, monkeypatch)
    monkeypatch.setattr(shared_passes, "free_memory", lambda device: PLENTY)
    monkeypatch.setattr(Again, "made", 0)
    return model


@pytest.fixture
def calls_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls each pass was for."""
    counts: list[int] = []
    original = PassGraphs.__call__

    def counting(self: PassGraphs, adapters: Any, batch: Any, work: Any) -> Any:
        counts.append(len(batch.counts))
        return original(self, adapters, batch, work)

    monkeypatch.setattr(PassGraphs, "__call__", counting)
    return counts


def begin(
    trainer: Trainer,
    adapter: Adapter,
    data: Sequence[Datum],
    loss: str = "importance_sampling",
    backward: bool = True,
) -> Call:
    return trainer.forward_backward(adapter, data, loss, OPTIONS.get(loss), backward, others_wait=lambda: True)


def by_turns(calls: Sequence[Call]) -> list[Any]:
    """A piece of each in turn, as the engine does it; what each gives, or the error it ends with."""
    outcomes: dict[int, Any] = {}
    while len(outcomes) < len(calls):
        for n, call in enumerate(calls):
            if n in outcomes:
                continue
            try:
                next(call)
            except StopIteration as stop:
                outcomes[n] = stop.value
            except BadRequest as error:
                outcomes[n] = error
    return [outcomes[n] for n in range(len(calls))]


def for_loss(data: Sequence[Datum], loss: str) -> list[Datum]:
    keys = ["target_tokens", "weights", *(["logprobs", "advantages"] if loss != "cross_entropy" else [])]
    return [Datum(datum.model_input, {key: datum.loss_fn_inputs[key] for key in keys}) for datum in data]


def train_all(trainer: Trainer, some: Sequence[Adapter], data: Sequence[list[Datum]], **how: Any) -> list[Any]:
    return by_turns([begin(trainer, adapter, each, **how) for adapter, each in zip(some, data, strict=True)])


def adapters(model: BaseModel, count: int, **config: Any) -> list[Adapter]:
    return [random_adapter(model, LoraConfig(rank=3, seed=n, **config), seed=n) for n in range(count)]


def datasets(count: int) -> list[list[Datum]]:
    """Of different lengths, some with beginnings in common; everybody begins with the first one's first prompt."""
    return [group_data(4, [5, 20, 9][: 1 + n % 3], [[7, 3, 11], [5], [2, 9]][: 1 + n % 3]) for n in range(count)]


@pytest.mark.parametrize("unembed", [True, False])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_those_who_share_a_pass_get_what_they_would_get_alone(
    model: BaseModel, calls_in_a_pass: list[int], loss: str, unembed: bool
) -> None:
    shared, alone = (adapters(model, 3, train_unembed=unembed) for _ in range(2))
    data = [for_loss(each, loss) for each in datasets(3)]
    trainer = Trainer(model, recorder=Again)
    for _ in range(3):  # as they are, recorded, and replayed
        found = train_all(trainer, shared, data, loss=loss)
    assert calls_in_a_pass == [3, 3, 3] and Again.made == 1
    for n, adapter in enumerate(alone):
        for _ in range(3):
            expected = train(Trainer(model), adapter, data[n], loss, OPTIONS.get(loss))
        assert_same(found[n], shared[n], expected, adapter)


def test_scores_share_a_pass_too(model: BaseModel, calls_in_a_pass: list[int]) -> None:
    shared, data = adapters(model, 2), datasets(2)
    found = train_all(Trainer(model), shared, data, backward=False)
    assert calls_in_a_pass == [2] and all(adapter.gradients is None for adapter in shared)
    for output, adapter, datums in zip(found, shared, data, strict=True):
        expected = train(Trainer(model), adapter, datums, backward=False)
        for mine, theirs in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(mine["logprobs"].to_numpy(), theirs["logprobs"].to_numpy(), atol=3e-5)


def test_the_recording_for_four_serves_three_of_others(model: BaseModel, calls_in_a_pass: list[int]) -> None:
    trainer, data = Trainer(model, recorder=Again), policy_data(lengths=[(30, 4)])
    for _ in range(2):
        train_all(trainer, adapters(model, 4), [data] * 4)
    longer = policy_data(lengths=[(40, 4)])
    fresh, alone = adapters(model, 3)[::-1], adapters(model, 3)[::-1]
    found = train_all(trainer, fresh, [longer] * 3)
    assert calls_in_a_pass == [4, 4, 3] and Again.made == 1
    for n, adapter in enumerate(alone):
        assert_same(found[n], fresh[n], train(Trainer(model), adapter, longer), adapter)


@pytest.mark.parametrize("loss", ["importance_sampling", "gspo"])
def test_what_is_not_finite_is_its_senders_alone(model: BaseModel, calls_in_a_pass: list[int], loss: str) -> None:
    shared, alone = adapters(model, 3), adapters(model, 3)
    with torch.no_grad():
        shared[0].values_P.fill_(float("nan"))
    data = datasets(3)
    data[2] = policy_data(lengths=[(12, 3)])
    data[2][0].loss_fn_inputs["logprobs"].to_numpy()[10] = -1e4
    found = train_all(Trainer(model), shared, data, loss=loss)
    assert calls_in_a_pass == [3]
    assert "have diverged" in str(found[0]) and "datum 0: the loss is" in str(found[2])
    assert shared[0].gradients is None and shared[2].gradients is None
    assert_same(found[1], shared[1], train(Trainer(model), alone[1], data[1], loss, OPTIONS.get(loss)), alone[1])


def test_only_what_goes_together_shares_a_pass(model: BaseModel, calls_in_a_pass: list[int]) -> None:
    trainer, data = Trainer(model, recorder=Again), policy_data(lengths=[(20, 4)])
    plain, other_rank = adapters(model, 3), random_adapter(model, LoraConfig(rank=2, seed=0))
    loss = "cross_entropy"
    by_turns([begin(trainer, a, data) for a in (plain[0], other_rank)])
    by_turns([begin(trainer, plain[0], data), begin(trainer, plain[1], for_loss(data, loss), loss)])
    by_turns([begin(trainer, plain[0], data), begin(trainer, plain[1], data, backward=False)])
    assert calls_in_a_pass == [1] * 6
    for _ in range(2):  # the first time the first one knows of nobody else
        by_turns([begin(trainer, plain[0], data), begin(trainer, other_rank, data), begin(trainer, plain[2], data)])
    assert calls_in_a_pass[6:9] == [1, 1, 1] and sorted(calls_in_a_pass[9:]) == [1, 2]


def test_everybody_who_comes_meanwhile_joins(model: BaseModel, calls_in_a_pass: list[int]) -> None:
    trainer, data = Trainer(model), policy_data(lengths=[(20, 4)])
    calls = [begin(trainer, adapter, data) for adapter in adapters(model, 5)]
    for some in (calls[:1], calls[1:3], calls[:1], calls[3:], calls[:3]):
        for call in some:
            next(call)
    assert not calls_in_a_pass
    by_turns(calls)
    assert calls_in_a_pass == [5]


def test_who_is_alone_waits_for_nobody_though_others_have_large_parts(
    model: BaseModel, calls_in_a_pass: list[int]
) -> None:
    trainer = Trainer(model, token_budget=50)
    small, large = adapters(model, 2)
    for _ in range(2):
        by_turns([begin(trainer, small, policy_data(lengths=[(20, 4)]))])
        by_turns([begin(trainer, large, policy_data(lengths=[(40, 4)]))])
    assert calls_in_a_pass == [1] * 4
    again = begin(trainer, small, policy_data(lengths=[(20, 4)]))
    next(again)
    assert calls_in_a_pass == [1] * 5, "launched at its first turn"


def test_who_comes_new_is_not_taken_for_one_who_has_left(model: BaseModel, calls_in_a_pass: list[int]) -> None:
    trainer, data = Trainer(model), policy_data(lengths=[(20, 4)])
    for _ in range(20):  # new adapters often lie where those lay that are gone
        train_all(trainer, adapters(model, 2), [data] * 2)
    assert calls_in_a_pass == [2] * 20


def test_a_pass_is_not_filled_beyond_its_budget_and_whoever_has_a_large_part_waits_for_nobody(
    model: BaseModel, calls_in_a_pass: list[int]
) -> None:
    trainer = Trainer(model, token_budget=50)
    found = train_all(trainer, adapters(model, 4), [policy_data(lengths=[(20, 4)])] * 4)
    assert calls_in_a_pass == [2, 2] and all(isinstance(one, ForwardBackwardOutput) for one in found)
    large = begin(trainer, adapters(model, 1)[0], policy_data(lengths=[(30, 4)]))
    next(large)
    assert calls_in_a_pass[2:] == [1], "more than half of the budget: launched at its first turn"


def test_memory_limits_how_many_share(
    model: BaseModel, calls_in_a_pass: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = adapters(model, 4)
    enough = 2 * shared_passes.BYTES_PER_VALUE * len(some[0].values_P) / shared_passes.SHARE_OF_FREE
    monkeypatch.setattr(shared_passes, "free_memory", lambda device: enough + 1)
    train_all(Trainer(model), some, datasets(4))
    assert calls_in_a_pass == [2, 2]


def test_a_shared_pass_that_finds_no_memory_is_done_one_by_one(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, alone, data = adapters(model, 3), adapters(model, 3), datasets(3)
    counts: list[int] = []
    original = PassGraphs.__call__

    def scarce(self: PassGraphs, adapters: Any, batch: Any, work: Any) -> Any:
        counts.append(len(batch.counts))
        if len(batch.counts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, adapters, batch, work)

    monkeypatch.setattr(PassGraphs, "__call__", scarce)
    found = train_all(Trainer(model), shared, data)
    assert counts.count(1) == 3
    for n, adapter in enumerate(alone):
        assert_same(found[n], shared[n], train(Trainer(model), adapter, data[n]), adapter)


def test_a_micro_batch_that_finds_no_memory_is_done_in_halves(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mint.engine.token_budget.cores", lambda: Cores(1))
    model, data = tiny_model("qwen3"), policy_data()
    whole, halved = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
    expected = train(Trainer(model), whole, data)
    sizes: list[int] = []
    original = PassGraphs.__call__

    def scarce(self: PassGraphs, adapters: Any, batch: Any, *rest: Any) -> Any:
        sizes.append(batch.tree.size)
        if batch.tree.size > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, adapters, batch, *rest)

    monkeypatch.setattr(PassGraphs, "__call__", scarce)
    trainer = Trainer(model)
    found = train(trainer, halved, data)
    assert sizes == [61, 40, 20, 20, 21]
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-5)
    assert whole.gradients is not None
    assert_gradients(halved.gradients, whole.gradients)
    with pytest.raises(torch.OutOfMemoryError):
        train(trainer, halved, policy_data(lengths=[(40, 4)]))


def test_a_call_that_is_given_up_takes_its_offer_along(model: BaseModel, calls_in_a_pass: list[int]) -> None:
    trainer, data = Trainer(model), policy_data(lengths=[(20, 4)])
    first, second = adapters(model, 2)
    given_up = begin(trainer, first, data)
    next(given_up)
    given_up.close()
    by_turns([begin(trainer, second, data)])
    assert calls_in_a_pass == [1] and not trainer._shared._waiting


def test_rows_and_targets_of_calls_lie_one_behind_the_other(model: BaseModel) -> None:
    parts = [Part(range(len(data)), read_data(data, "importance_sampling", {}, model.facts)) for data in datasets(3)]
    batch = pack(parts, filled=True)
    starts = batch.owners.starts.tolist()
    assert len(starts) == 5 and starts[0] == 0 and starts[3] == starts[4] == len(batch.tokens_T)
    rows = [stop - start for start, stop in pairwise(starts)]
    assert rows[:2] == [part.tree.size for part in parts[:2]] and rows[2] >= parts[2].tree.size
    assert batch.owners.owner_T.tolist() == [n for n, count in enumerate(rows) for _ in range(count)]
    for n, part in enumerate(parts):
        assert (batch.call_S == n).sum() == sum(example.targets_NK.size for example in part.chosen)
        for index, values in batch.of_call(n, torch.arange(float(len(batch.call_S)))):
            assert values.shape == part.chosen[index].target_shape
            assert (batch.call_S[values.ravel().astype(int)] == n).all()
