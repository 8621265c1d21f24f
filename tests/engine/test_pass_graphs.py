"""Filled micro-batches and recorded passes give what plain passes give.

A CPU has neither flash attention nor CUDA graphs: here the first is written out, and a recording computes again from
the tensors it was made with, which is all a graph can see. The real ones: `test_training_on_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import SHARED, group_data, random_adapter
from test_trainer import assert_gradients, policy_data, train
from torch import Tensor

from mint.engine import layers, memory, pass_graphs
from mint.engine.layers import FusedLayers
from mint.engine.lora import Adapter
from mint.engine.losses import LOSSES
from mint.engine.model import BaseModel
from mint.engine.planning import plan_evenly
from mint.engine.shared_attention import FlashLayout, power_of_two, rounded
from mint.engine.token_budget import TokenBudget
from mint.engine.trainer import Trainer
from mint.engine.training_pass import Pass
from mint.types import Datum, ForwardBackwardOutput, LoraConfig, ModelInput

OPTIONS = {"ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, "dro": {"beta": 0.3}}
# The CPU's memory does not matter here.
PLENTY = 2**40


def dense_attention(layout: FlashLayout, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """What flash attention makes of a layout, written out: the ends of a node's queries and keys are lined up."""
    if layout.keys_S is not None:
        k, v = k[layout.keys_S], v[layout.keys_S]
    out = []
    group = q.shape[1] // k.shape[1]
    spans = zip(pairwise(layout.query_starts.tolist()), pairwise(layout.key_starts.tolist()), strict=True)
    for (q_start, q_stop), (k_start, k_stop) in spans:
        assert q_stop - q_start <= len(layout.query_span) and k_stop - k_start <= len(layout.key_span)
        keys, values = (x[k_start:k_stop].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q_start:q_stop], keys) * scale
        here = torch.arange(k_stop - k_start, device=q.device)
        distance = here[k_stop - k_start - (q_stop - q_start) :, None] - here[None]
        hidden = (distance < 0) | (distance >= (window or 10**9))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    assert len(k) == k_stop and len(q) == q_stop, "rows nobody looks at: flash attention would not write them"
    return torch.cat(out)


class Again:
    """A recording that computes again. Counts what was recorded and replayed."""

    made = 0
    bytes = 1000

    def __init__(self, function: Callable[[], Pass], pool: Any) -> None:
        type(self).made += 1
        self._function = function
        self.replays = 0

    def __call__(self) -> Pass:
        self.replays += 1
        return self._function()


@pytest.fixture(autouse=True)
def nothing_made_yet() -> None:
    Again.made = 0


def on_a_gpu(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model trains as it would there: filled, and through recordings."""
    monkeypatch.setattr(layers, "flash_attention", dense_attention)
    monkeypatch.setattr(layers, "compiled", lambda function: function)
    monkeypatch.setattr(model, "native_training", None)
    monkeypatch.setattr(memory, "free_memory", lambda device: PLENTY)
    monkeypatch.setattr(model, "_fused", FusedLayers.of(model._decoder, model.windows, flash=True))
    assert model.trains_filled and model.trains_recorded


def recording(model: BaseModel, **settings: Any) -> Trainer:
    return Trainer(model, recorder=Again, **settings)


def recordings(trainer: Trainer) -> list[Any]:
    return [entry[0] for entry in trainer._run._recorded.values()]


def assert_same(
    found: ForwardBackwardOutput, adapter: Adapter, expected: ForwardBackwardOutput, reference: Adapter
) -> None:
    for mine, theirs in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(mine["logprobs"].to_numpy(), theirs["logprobs"].to_numpy(), atol=3e-5)
    ours, theirs = dict(found.metrics), dict(expected.metrics)
    # A sum of terms of either sign, over as many tokens as have such differences.
    assert ours.pop("loss:sum") == pytest.approx(theirs.pop("loss:sum"), rel=1e-4, abs=3e-4)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert reference.gradients is not None
    assert_gradients(adapter.gradients, reference.gradients)


@pytest.mark.parametrize("shape", [*SHARED, "of one length"])
def test_a_filled_micro_batch_gives_what_an_unfilled_one_gives(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    data = group_data(4, *SHARED.get(shape, ([0] * 17, [[7]] * 17)))
    plain, filled = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
    expected = train(Trainer(model), plain, data)
    on_a_gpu(model, monkeypatch)
    assert_same(train(Trainer(model), filled, data), filled, expected, plain)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_recorded_pass_serves_other_data_of_its_size(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch, loss_fn: str
) -> None:
    model = tiny_model("qwen3")
    keys = ["target_tokens", "weights", *(["logprobs", "advantages"] if loss_fn != "cross_entropy" else [])]
    calls = []
    for seed, lengths in enumerate([[30, 11, 20], [29, 14, 17], [32, 9, 19], [21, 18, 22]]):
        made = group_data(seed, [0] * 3, [[n] for n in lengths])
        calls.append([Datum(d.model_input, {k: d.loss_fn_inputs[k] for k in keys}) for d in made])

    def run(trainer: Trainer, adapter: Adapter, n: int) -> ForwardBackwardOutput:
        return train(trainer, adapter, calls[n], loss_fn, OPTIONS.get(loss_fn))

    plain = [random_adapter(model, LoraConfig(rank=3, seed=n), n) for n in range(4)]
    expected = [run(Trainer(model), adapter, n) for n, adapter in enumerate(plain)]
    on_a_gpu(model, monkeypatch)
    trainer = recording(model)
    for n in range(4):  # another adapter each time
        adapter = random_adapter(model, LoraConfig(rank=3, seed=n), n)
        assert_same(run(trainer, adapter, n), adapter, expected[n], plain[n])
    assert [one.replays for one in recordings(trainer)] == [3]


def test_soft_targets_and_beginnings_in_common_are_recorded_too(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    rng = np.random.default_rng(0)
    soft = [
        Datum(ModelInput.from_ints(rng.integers(0, 97, 9).tolist()), {"target_tokens": rng.integers(0, 97, (9, 2))})
        for _ in range(3)
    ]
    shared = group_data(5, *SHARED["groups, singles and a short prompt"])
    for data, loss_fn in ((soft, "cross_entropy"), (shared, "importance_sampling")):
        plain, ours = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
        expected = train(Trainer(model), plain, data, loss_fn)
        with monkeypatch.context() as patch:
            on_a_gpu(model, patch)
            trainer = recording(model)
            for _ in range(3):
                ours.gradients_P = None
                found = train(trainer, ours, data, loss_fn)
            assert_same(found, ours, expected, plain)
            assert [one.replays for one in recordings(trainer)] == [2]


def test_gradients_of_several_recorded_micro_batches_add_up(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = tiny_model("qwen3"), policy_data(lengths=[(16, 4)] * 8)
    plain, ours = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
    expected = train(Trainer(model), plain, data)
    on_a_gpu(model, monkeypatch)
    trainer = recording(model, token_budget=32)
    found = train(trainer, ours, data)
    assert [one.replays for one in recordings(trainer)] == [3]
    assert_same(found, ours, expected, plain)


def test_two_tenants_by_turns_share_a_recording_and_get_what_each_gets_alone(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3")
    data = [policy_data(seed=n, lengths=[(16, 4)] * 6) for n in range(2)]
    alone, together = ([random_adapter(model, LoraConfig(rank=3, seed=n), n) for n in range(2)] for _ in range(2))
    expected = [train(Trainer(model), adapter, mine) for adapter, mine in zip(alone, data, strict=True)]
    on_a_gpu(model, monkeypatch)
    trainer = recording(model, token_budget=32)
    calls = [
        trainer.forward_backward(adapter, mine, "importance_sampling", None, True)
        for adapter, mine in zip(together, data, strict=True)
    ]
    found: list[ForwardBackwardOutput | None] = [None, None]
    while None in found:
        for n, call in enumerate(calls):
            try:
                next(call)
            except StopIteration as done:
                found[n] = done.value
    assert [one.replays for one in recordings(trainer)] == [5]
    for n in range(2):
        answer = found[n]
        assert answer is not None
        assert_same(answer, together[n], expected[n], alone[n])


def test_adapters_of_one_shape_share_a_recording_and_others_get_their_own(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = tiny_model("qwen3"), policy_data()
    on_a_gpu(model, monkeypatch)
    trainer = recording(model)
    made = []
    for config in (LoraConfig(rank=3, seed=0), LoraConfig(rank=3, seed=1), LoraConfig(rank=4, seed=0)):
        adapter = random_adapter(model, config)
        for _ in range(2):
            train(trainer, adapter, data)
        made.append(Again.made)
    scaled = random_adapter(model, LoraConfig(rank=3, seed=0))
    scaled.scale *= 2
    train(trainer, scaled, data)
    train(trainer, scaled, data)
    train(trainer, scaled, data, backward=False)
    train(trainer, scaled, data, backward=False)
    assert [*made, Again.made] == [1, 1, 2, 4]


def test_there_are_only_so_many_recordings_and_the_least_recently_used_goes(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_graphs, "MOST_RECORDINGS", 2)
    monkeypatch.setattr(pass_graphs, "MOST_SIZES_REMEMBERED", 3)
    model = tiny_model("llama")
    on_a_gpu(model, monkeypatch)
    trainer, adapter = recording(model), random_adapter(model, LoraConfig(rank=2, seed=0))
    sizes = [policy_data(lengths=[(n, 2)]) for n in (10, 20, 40, 50)] + [policy_data(lengths=[(50, 2), (40, 2)])]
    for n in (0, 0, 1, 1, 0, 2, 2, 0):
        train(trainer, adapter, sizes[n])
    assert Again.made == 3 and [one.replays for one in recordings(trainer)] == [1, 3]
    for data in (sizes[3], sizes[4], sizes[1], sizes[3]):
        train(trainer, adapter, data)
    assert len(trainer._run._kept) <= 3


def test_where_memory_is_short_passes_are_run_as_they_are(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    on_a_gpu(model, monkeypatch)
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * pass_graphs.BESIDE_BYTES - 2)
    trainer, adapter = recording(model), random_adapter(model, LoraConfig(rank=2, seed=0))
    for _ in range(3):
        train(trainer, adapter, policy_data())
    assert Again.made == 0


def test_a_pass_that_cannot_be_recorded_is_run_as_it_is(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    on_a_gpu(model, monkeypatch)
    tries = []

    def failing(function: Callable[[], Pass], pool: Any) -> Any:
        tries.append(function)
        raise RuntimeError("operation not permitted when stream is capturing")

    trainer = Trainer(model, recorder=failing)
    ours, plain = (random_adapter(model, LoraConfig(rank=2, seed=0)) for _ in range(2))
    for _ in range(3):
        train(trainer, ours, policy_data())
        train(Trainer(model), plain, policy_data())
    assert len(tries) == 1 and "could not be recorded" in caplog.text
    assert plain.gradients is not None
    assert_gradients(ours.gradients, plain.gradients)


def test_recordings_go_when_memory_runs_out_or_weights_move_and_come_back(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BaseModel.load(str(tiny_folder("llama")))
    on_a_gpu(model, monkeypatch)
    trainer, adapter = recording(model), random_adapter(model, LoraConfig(rank=2, seed=0))
    data = policy_data()
    for _ in range(2):
        train(trainer, adapter, data)
    assert trainer._run.bytes == Again.bytes and trainer._run in memory._reserves
    memory.give_back_reserves()
    assert not recordings(trainer) and trainer._run.bytes == 0

    for _ in range(2):
        train(trainer, adapter, data)
    assert len(recordings(trainer)) == 1

    def scarce() -> Pass:
        raise torch.OutOfMemoryError("CUDA out of memory")

    recordings(trainer)[0]._function = scarce
    most = trainer._budget.tokens
    train(trainer, adapter, data)  # whole, in the memory that the recording had
    assert not recordings(trainer) and trainer._budget.tokens == most
    assert trainer._run._share == pass_graphs.SHARE_OF_FREE / 4

    for _ in range(2):
        train(trainer, adapter, data)
    before = recordings(trainer)
    linear = next(iter(model.linears.values()))
    linear.weight.data = linear.weight.data.clone()
    train(trainer, adapter, data)
    assert before and not recordings(trainer)


def test_an_error_in_a_filled_batch_names_its_datum(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    on_a_gpu(model, monkeypatch)
    data = policy_data()
    data[1].loss_fn_inputs["logprobs"].to_numpy()[15] = -1e4
    with pytest.raises(Exception, match=r"datum 1: the loss is .*inf at position 15"):
        train(Trainer(model), random_adapter(model, LoraConfig(rank=2, seed=0)), data)


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 100, 1000, 16384, 17393])
def test_sizes_are_rounded_up_by_an_eighth_at_most(count: int) -> None:
    assert count <= rounded(count) <= count * 9 / 8
    assert rounded(rounded(count)) == rounded(count)
    assert count <= rounded(count, 16) < max(count * 9 / 8, count + 16) and rounded(count, 16) % 16 == 0
    assert count <= power_of_two(count) < 2 * count


def test_on_a_gpu_micro_batches_are_of_like_size_and_none_is_small(model: BaseModel) -> None:
    budget = TokenBudget(model, lean=False)
    budget._adapts, budget.lanes, budget.tokens = True, 1, 1000
    lengths = [300, 260, 240, 200, 100, 90]
    sequences = [np.arange(length) + 1000 * n for n, length in enumerate(lengths)]
    assert plan_evenly(sequences[:5], budget.tokens, budget.parts) == [[0, 1, 2, 3, 4]], "1,100 are few enough for one"
    cut = plan_evenly(sequences, budget.tokens, budget.parts)
    assert sorted(index for part in cut for index in part) == list(range(6))
    sizes = [sum(lengths[index] for index in part) for part in cut]
    assert len(sizes) == 2 and min(sizes) > 500, sizes


def test_weights_that_lie_together_are_taken_as_one() -> None:
    whole = torch.randn(10, 3)
    q, k, v = whole.split([6, 2, 2])
    assert torch.equal(layers._one_weight([q, k, v]), whole)  # type: ignore[arg-type]
    assert layers._one_weight([q, v, k]) is None
    assert layers._one_weight([q, k, v.clone()]) is None
    assert layers._one_weight([whole.T[:2], whole.T[2:]]) is None


def test_layers_laid_out_for_sampling_train_as_they_did(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3")
    monkeypatch.setitem(model.__dict__, "native_training", None)
    before, after = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
    data = policy_data()
    expected = train(Trainer(model), before, data)
    assert model.fused is not None
    weights = layers._weights(model._fused._linears[0])  # type: ignore[union-attr]
    assert weights["self_attn.q_proj"].together is not None and weights["mlp.gate_proj"].together is not None
    assert_same(train(Trainer(model), after, data), after, expected, before)
