"""The trainer against transformers + PEFT, one unpadded sequence at a time, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import logprobs, peft_gradients, peft_model, policy_datum, random_adapter, random_tokens
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mint.engine import layers, token_budget
from mint.engine import logprobs as chunked
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.token_budget import TokenBudget
from mint.engine.trainer import Trainer
from mint.errors import BadRequest
from mint.types import Datum, ForwardBackwardOutput, LoraConfig, ModelInput

LENGTHS = [(11, 4), (20, 9), (3, 1), (20, 0), (7, 5)]


def train(
    trainer: Trainer,
    adapter: Adapter,
    data: Sequence[Datum],
    loss_fn: str = "importance_sampling",
    config: Mapping[str, float] | None = None,
    backward: bool = True,
) -> ForwardBackwardOutput:
    call = trainer.forward_backward(adapter, data, loss_fn, config, backward)
    while True:
        try:
            next(call)
        except StopIteration as done:
            return done.value


def policy_data(seed: int = 0, lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [policy_datum(rng, length, prompt) for length, prompt in lengths]


def array(datum: Datum, key: str) -> Tensor:
    return datum.loss_fn_inputs[key].to_torch()


def reference_loss(name: str, p: Tensor, datum: Datum) -> Tensor:
    """The sum over one datum, from the formulas of the documentation."""
    if name == "cross_entropy":
        return -(array(datum, "weights") * p).sum()
    w, q, a = (array(datum, key) for key in ("weights", "logprobs", "advantages"))
    ratio = torch.exp(p - q)
    if name == "gspo":
        mean = ((p - q) * w).sum() / w.sum()
        ratio = torch.exp(mean).detach() * torch.exp(p - p.detach())
    low, high = {"cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}.get(name, (0.8, 1.2))
    objective = {
        "importance_sampling": ratio * a,
        "ppo": torch.minimum(ratio * a, ratio.clamp(low, high) * a),
        "cispo": ratio.clamp(low, high).detach() * p * a,
        "dro": p * a - 0.025 * (p - q) ** 2,
        "gspo": torch.minimum(ratio * a, ratio.clamp(low, high) * a),
    }[name]
    return -(w * objective).sum()


def assert_gradients(ours: list[Tensor] | None, theirs: list[Tensor]) -> None:
    assert ours is not None
    assert max(float(g.abs().max()) for g in theirs) > 1e-2
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-3, atol=2e-4 * float(reference.abs().max()) + 1e-6)


LOSS_NAMES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_losses_log_probs_and_gradients_are_those_of_peft_and_autograd(
    model: BaseModel, family: str, tiny_folder: Callable[[str], Path], name: str
) -> None:
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0))
    data = policy_data()
    if name == "cross_entropy":
        data = [Datum(d.model_input, {k: d.loss_fn_inputs[k] for k in ("target_tokens", "weights")}) for d in data]
    output = train(Trainer(model, token_budget=32), adapter, data, name)

    reference = peft_model(tiny_folder(family), adapter)
    loss = torch.zeros(())
    for datum, found in zip(data, output.loss_fn_outputs, strict=True):
        p = logprobs(reference, datum)
        torch.testing.assert_close(found["logprobs"].to_torch(), p.detach(), atol=2e-5, rtol=1e-5)
        loss = loss + reference_loss(name, p, datum)
    loss.backward()
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
    assert_gradients(adapter.gradients, peft_gradients(reference, adapter))


@pytest.mark.parametrize("flags", [dict(train_attn=False, train_mlp=False), dict(train_unembed=False)])
def test_gradients_hold_with_only_the_unembedding_and_without_it(
    tiny_model: Callable[[str], BaseModel], tiny_folder: Callable[[str], Path], flags: dict[str, bool]
) -> None:
    adapter = random_adapter(tiny_model("qwen3"), LoraConfig(rank=3, seed=0, **flags))
    data = policy_data()
    train(Trainer(tiny_model("qwen3")), adapter, data)
    reference = peft_model(tiny_folder("qwen3"), adapter)
    sum(reference_loss("importance_sampling", logprobs(reference, d), d) for d in data).backward()  # type: ignore[union-attr]
    assert_gradients(adapter.gradients, peft_gradients(reference, adapter))


def test_soft_targets_are_scored_cell_by_cell(
    tiny_model: Callable[[str], BaseModel], tiny_folder: Callable[[str], Path]
) -> None:
    rng = np.random.default_rng(3)
    adapter = random_adapter(tiny_model("gemma3"), LoraConfig(rank=3, seed=0))
    data = [
        Datum(
            ModelInput.from_ints(random_tokens(rng, length)),
            {"target_tokens": rng.integers(0, 97, shape), "weights": rng.normal(size=shape)},
        )
        for length, shape in ((6, (6, 3)), (4, (4,)), (5, (5, 2)))
    ]
    output = train(Trainer(tiny_model("gemma3")), adapter, data, "cross_entropy")
    reference = peft_model(tiny_folder("gemma3"), adapter)
    loss = torch.zeros(())
    for datum, found in zip(data, output.loss_fn_outputs, strict=True):
        p = logprobs(reference, datum)
        torch.testing.assert_close(found["logprobs"].to_torch(), p.detach(), atol=2e-5, rtol=1e-5)
        loss = loss + reference_loss("cross_entropy", p, datum)
    loss.backward()
    assert_gradients(adapter.gradients, peft_gradients(reference, adapter))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 97 * 4, 2**24], ids=["one", "four", "all"])
def test_chunked_log_probs_equal_a_plain_log_softmax_forward_and_backward(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float
) -> None:
    monkeypatch.setitem(chunked.CHUNK_LOGITS, "cpu", chunk)
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 1)
    torch.manual_seed(0)
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0))
    pair = adapter.weights["lm_head"]
    targets = torch.randint(0, 97, (11, 2))
    coefficients = torch.randn(11, 2)
    coefficients[3:6] = 0
    hidden = torch.randn(11, 32, requires_grad=True)
    live = coefficients.ne(0).any(dim=1).numpy()
    cells = chunked.Cells.of(np.repeat(np.arange(11), 2), targets.reshape(-1).numpy(), live)

    plain = torch.log_softmax(model.logits(hidden, [(adapter, 11)]) / temperature, dim=-1).gather(1, targets)
    expected = torch.autograd.grad((plain * coefficients).sum(), [hidden, *pair])
    found = chunked.target_logprobs(model, adapter, hidden, cells, temperature).reshape(11, 2)
    torch.testing.assert_close(found, plain, atol=2e-6, rtol=1e-5)
    gradients = torch.autograd.grad((found * coefficients).sum(), [hidden, *pair])
    for mine, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)
    assert not gradients[0][3:6].any()


@pytest.mark.parametrize("unembed", [True, False])
def test_logits_are_computed_once_and_again_only_for_the_gradient_of_the_unembedding_where_it_has_one(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch, unembed: bool
) -> None:
    model = tiny_model("gemma3")
    adapter = model.new_adapter(LoraConfig(rank=2, seed=0, train_unembed=unembed))
    rows: list[int] = []
    original = chunked._Unembedding.products

    def counting(self: Any, start: int, stop: int) -> Tensor:
        rows.append(stop - start)
        return original(self, start, stop)

    monkeypatch.setattr(chunked._Unembedding, "products", counting)
    train(Trainer(model), adapter, policy_data(lengths=[(20, 17)]))
    assert rows == ([3, 17, 3] if unembed else [3, 17])


def test_the_temperature_option_matches_log_probs_recorded_after_tempering(
    tiny_model: Callable[[str], BaseModel], tiny_folder: Callable[[str], Path]
) -> None:
    adapter = random_adapter(tiny_model("qwen2"), LoraConfig(rank=3, seed=0))
    reference = peft_model(tiny_folder("qwen2"), adapter)
    (datum,) = policy_data(lengths=[(12, 4)])
    tempered = logprobs(reference, datum, temperature=0.8).detach()
    datum = Datum(datum.model_input, datum.loss_fn_inputs | {"logprobs": tempered})
    output = train(Trainer(tiny_model("qwen2")), adapter, [datum], config={"temperature": 0.8})
    torch.testing.assert_close(output.loss_fn_outputs[0]["logprobs"].to_torch(), tempered, atol=2e-5, rtol=1e-5)
    assert output.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("name", ["importance_sampling", "gspo"])
def test_two_calls_accumulate_to_one_call_whatever_the_micro_batches(
    tiny_model: Callable[[str], BaseModel], name: str
) -> None:
    model, data = tiny_model("gemma3"), policy_data()
    together, apart, small = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(3))
    whole = train(Trainer(model), together, data, name)
    train(Trainer(model), apart, data[:2], name)
    train(Trainer(model), apart, data[2:], name)
    pieces = train(Trainer(model, token_budget=1), small, data, name)
    for other in (apart.gradients, small.gradients):
        assert together.gradients is not None
        assert_gradients(other, together.gradients)
    assert whole.metrics == pytest.approx(pieces.metrics, rel=1e-4, abs=1e-5)
    for one, other_output in zip(whole.loss_fn_outputs, pieces.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].to_numpy(), other_output["logprobs"].to_numpy(), atol=2e-5)


def test_a_call_pauses_after_each_micro_batch(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("llama")
    call = Trainer(model, token_budget=20).forward_backward(
        model.new_adapter(LoraConfig(rank=2)), policy_data(), "ppo", {}, True
    )
    assert len(list(call)) == 4  # 20, 20, 11 + 7, 3


def test_an_abandoned_call_leaves_the_gradients_alone(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("llama")
    adapter = model.new_adapter(LoraConfig(rank=2))
    call = Trainer(model, token_budget=20).forward_backward(adapter, policy_data(), "ppo", {}, True)
    next(call)
    call.close()
    assert adapter.gradients is None


def test_forward_gives_the_same_numbers_and_no_gradients(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("qwen3")
    adapter = random_adapter(model, LoraConfig(rank=2, seed=0))
    forward = train(Trainer(model), adapter, policy_data(), "ppo", backward=False)
    assert adapter.gradients is None
    assert forward == train(Trainer(model), adapter, policy_data(), "ppo")


def test_gradients_are_found_whatever_mode_the_caller_is_in(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("qwen3")
    adapter = random_adapter(model, LoraConfig(rank=2, seed=0))
    with torch.no_grad():
        train(Trainer(model), adapter, policy_data())
    assert adapter.gradients is not None and any(g.any() for g in adapter.gradients)


def test_metrics_are_means_over_the_whole_call(
    tiny_model: Callable[[str], BaseModel], tiny_folder: Callable[[str], Path]
) -> None:
    adapter = random_adapter(tiny_model("qwen3"), LoraConfig(rank=3, seed=0))
    data = policy_data()
    metrics = train(Trainer(tiny_model("qwen3"), token_budget=12), adapter, data, "ppo").metrics
    reference = peft_model(tiny_folder("qwen3"), adapter)
    with torch.no_grad():
        p, q, w, a = (
            torch.cat(parts)
            for parts in (
                [logprobs(reference, d) for d in data],
                *([array(d, key) for d in data] for key in ("logprobs", "weights", "advantages")),
            )
        )
    p, q, a = p[w != 0], q[w != 0], a[w != 0]
    ratio = torch.exp(p - q)
    clipped = ((a > 0) & (ratio > 1.2)) | ((a < 0) & (ratio < 0.8))
    assert metrics == pytest.approx(
        {
            "loss:sum": metrics["loss:sum"],
            "tokens:sum": len(p),
            "ratio:mean": float(ratio.mean()),
            "ratio:min": float(ratio.min()),
            "ratio:max": float(ratio.max()),
            "clip_fraction:mean": float(clipped.float().mean()),
            "kl_sample_train:mean": float((q - p).mean()),
            "entropy_sampled:mean": float(-p.mean()),
        },
        rel=1e-3,
    )
    assert all(name.count(":") == 1 for name in metrics)


def test_the_three_key_form_gives_the_gradients_and_metrics_of_the_four_key_form(
    tiny_model: Callable[[str], BaseModel],
) -> None:
    model, data = tiny_model("llama"), policy_data()
    three = [
        Datum(d.model_input, {k: v for k, v in d.loss_fn_inputs.items() if k != "weights"} | {"logprobs": w * q})
        for d in data
        for w, q in [(array(d, "weights"), array(d, "logprobs"))]
    ]
    first, second = (random_adapter(model, LoraConfig(rank=3, seed=0)) for _ in range(2))
    four_keys, three_keys = train(Trainer(model), first, data), train(Trainer(model), second, three)
    assert three_keys.metrics == pytest.approx(four_keys.metrics, rel=1e-4)
    assert first.gradients is not None
    assert_gradients(second.gradients, first.gradients)


def test_negative_and_large_weights_are_taken_as_they_are(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("llama")
    tokens = random_tokens(np.random.default_rng(0), 6)

    def gradients(weights: list[float]) -> list[Tensor]:
        adapter = random_adapter(model, LoraConfig(rank=2, seed=0))
        datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})
        train(Trainer(model), adapter, [datum], "cross_entropy")
        assert adapter.gradients is not None
        return adapter.gradients

    scaled = [-250 * g for g in gradients([0, 0, 1, 2, 0.5])]
    assert_gradients(gradients([0, 0, -250, -500, -125]), scaled)


def test_a_refused_call_leaves_earlier_gradients_untouched(tiny_model: Callable[[str], BaseModel]) -> None:
    model, data = tiny_model("llama"), policy_data()
    adapter = random_adapter(model, LoraConfig(rank=2, seed=0))
    trainer = Trainer(model, token_budget=20)
    train(trainer, adapter, data)
    assert adapter.gradients is not None
    before = [g.clone() for g in adapter.gradients]
    for bad, message in (
        ({"advantages": np.full(7, np.nan)}, "datum 4: advantages holds nan"),
        ({"logprobs": np.full(7, -1e30)}, "datum 4: the loss is -?inf at position 5"),
        ({"advantages": np.full(7, 3e38), "logprobs": np.full(7, -9)}, r"datum 4: the loss is -?inf"),
    ):
        faulty = Datum(data[4].model_input, data[4].loss_fn_inputs | bad)  # the shorter micro-batches went well before
        with pytest.raises(BadRequest, match=message):
            train(trainer, adapter, [*data[:4], faulty])
        assert all(torch.equal(g, b) for g, b in zip(adapter.gradients, before, strict=True))


def test_a_gradient_that_overflows_is_reported_and_not_kept(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("llama")
    adapter = random_adapter(model, LoraConfig(rank=2, seed=0))
    tokens = random_tokens(np.random.default_rng(0), 9)
    weights = np.array([1e37, -1e37] * 4)  # the losses cancel to something finite, the gradients do not
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})
    with pytest.raises(BadRequest, match="the loss is finite but its gradient is not"):
        train(Trainer(model), adapter, [datum], "cross_entropy")
    assert adapter.gradients is None


def test_weights_that_diverged_are_reported(tiny_model: Callable[[str], BaseModel]) -> None:
    adapter = random_adapter(tiny_model("llama"), LoraConfig(rank=2, seed=0))
    with torch.no_grad():
        adapter.parameters()[0].fill_(torch.nan)
    with pytest.raises(BadRequest, match="weights have diverged"):
        train(Trainer(tiny_model("llama")), adapter, policy_data())


def test_all_weights_zero_is_a_call_with_zero_loss(tiny_model: Callable[[str], BaseModel]) -> None:
    adapter = random_adapter(tiny_model("llama"), LoraConfig(rank=2, seed=0))
    output = train(Trainer(tiny_model("llama")), adapter, policy_data(lengths=[(5, 5)]))
    assert output.metrics == {"loss:sum": 0.0, "tokens:sum": 0.0}
    assert adapter.gradients is not None and not any(g.any() for g in adapter.gradients)


def test_what_a_micro_batch_may_hold_follows_the_memory_a_gpu_has_and_on_a_cpu_the_model_alone(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3")
    steady = TokenBudget(model, lean=False)
    steady.measured(1000, 2**40)
    assert steady.tokens == TokenBudget(model, lean=True).tokens == token_budget.MOST_TOKENS["cpu"]
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    monkeypatch.setattr(token_budget, "free_memory", lambda device: 9 * 2**30)
    budget = TokenBudget(model, lean=False)
    budget.measured(1000, 2**30)
    assert budget.tokens == 4500  # half of what is free, at a MiB or so a token
    budget.measured(1000, 2**20)
    assert budget.tokens == token_budget.MOST_TOKENS["cuda"]
    budget.halve()
    budget.measured(1000, 2**20)
    assert budget.tokens == token_budget.MOST_TOKENS["cuda"] // 2


def test_a_lean_pass_that_failed_leaves_nothing_behind_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def noting() -> Iterator[None]:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield

    def checkpoint(run: Callable[[Tensor], Tensor], x: Tensor, **_: object) -> Tensor:
        """As torch has it before 2.13: what notes a pass ends with this frame, which an error keeps alive."""
        notes = noting()
        next(notes)
        return run(x)

    def out_of_memory(x: Tensor) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(layers, "checkpoint", checkpoint)
    with pytest.raises(MemoryError) as held:
        layers._computed_again(out_of_memory, torch.ones(3, requires_grad=True))
    assert held.value and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
