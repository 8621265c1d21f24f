"""Reverse KL against PEFT and autograd, with whole distributions and no chunks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import logits, peft_gradients, peft_model, plain_model, random_adapter, random_tokens
from test_trainer import assert_gradients

import mint.engine.logprobs as chunked
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.trainer import Trainer
from mint.errors import BadRequest
from mint.types import Datum, ForwardBackwardOutput, LoraConfig, ModelInput


def datum(tokens: list[int], weights: list[float]) -> Datum:
    """Weights of the last tokens; those before have none."""
    padded = [0.0] * (len(tokens) - 1 - len(weights)) + weights
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": padded})


def texts(seed: int = 0) -> tuple[list[Datum], list[Datum]]:
    """Two groups with prompts in common; the reference reads longer and shorter prompts before the same answers."""
    rng = np.random.default_rng(seed)
    own, other = [], []
    for prompt, told in ((12, 20), (6, 3)):
        asked, hint = random_tokens(rng, prompt), random_tokens(rng, told)
        for length in (5, 9, 1):
            answer, weights = random_tokens(rng, length), rng.normal(size=length).tolist()
            own.append(datum([*asked, *answer], weights))
            other.append(datum([*hint, *answer], weights))
    return own, other


def run(
    model: BaseModel, adapter: Adapter, reference: Adapter | None, temperature: float = 1.0, budget: int | None = None
) -> ForwardBackwardOutput:
    return finished(Trainer(model, budget).reverse_kl(adapter, reference, *texts(), temperature))


def finished(steps: Generator[None, None, ForwardBackwardOutput]) -> ForwardBackwardOutput:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("flags", [{}, {"train_unembed": False}])
def test_losses_and_gradients_are_those_of_peft_and_autograd(
    model: BaseModel, family: str, tiny_folder: Callable[[str], Path], temperature: float, flags: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(chunked, "FEWEST_ROWS", 4)
    monkeypatch.setitem(chunked.CHUNK_LOGITS, "cpu", 1)  # so that there are several chunks
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0, **flags), 1)
    other = random_adapter(model, LoraConfig(rank=5, seed=4), 2)
    output = run(model, adapter, other.snapshot(), temperature, budget=24)

    student, teacher = peft_model(tiny_folder(family), adapter), peft_model(tiny_folder(family), other)
    total = torch.zeros(())
    for own, told, found in zip(*texts(), output.loss_fn_outputs, strict=True):
        weights = own.loss_fn_inputs["weights"].to_torch()
        count = int((weights != 0).sum())
        p = torch.log_softmax(logits(student, own.model_input.to_ints())[-count:] / temperature, -1)
        q = torch.log_softmax(logits(teacher, told.model_input.to_ints())[-count:].detach() / temperature, -1)
        loss = weights[-count:] * (p.exp() * (p - q)).sum(-1)
        torch.testing.assert_close(found["loss"].to_torch()[-count:], loss.detach(), atol=3e-5, rtol=1e-4)
        assert not found["loss"].to_torch()[:-count].any()
        total = total + loss.sum()
    total.backward()
    assert output.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4, abs=1e-5)
    assert_gradients(adapter.gradients, peft_gradients(student, adapter))


def test_the_base_model_as_reference_and_what_the_metrics_say(
    tiny_model: Callable[[str], BaseModel], tiny_folder: Callable[[str], Path]
) -> None:
    model = tiny_model("qwen3")
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0), 1)
    output = run(model, adapter, None)
    student, base = peft_model(tiny_folder("qwen3"), adapter), plain_model(tiny_folder("qwen3"))
    divergences, surprises = [], []
    with torch.no_grad():
        for own, told in zip(*texts(), strict=True):
            count = int((own.loss_fn_inputs["weights"].to_torch() != 0).sum())
            p = torch.log_softmax(logits(student, own.model_input.to_ints())[-count:], -1)
            q = torch.log_softmax(logits(base, told.model_input.to_ints())[-count:], -1)
            divergences += (p.exp() * (p - q)).sum(-1).tolist()
            targets = own.loss_fn_inputs["target_tokens"].to_torch()[-count:]
            surprises += (-p.gather(1, targets[:, None])[:, 0]).tolist()
    assert output.metrics["tokens:sum"] == len(divergences) == 30
    assert output.metrics["kl:mean"] == pytest.approx(np.mean(divergences), rel=1e-4)
    assert output.metrics["entropy_sampled:mean"] == pytest.approx(np.mean(surprises), rel=1e-4)


def test_a_policy_differs_from_itself_by_nothing(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("llama")
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0), 1)
    own, _ = texts()
    output = finished(Trainer(model).reverse_kl(adapter, adapter.snapshot(), own, own, 1.0))
    assert output.metrics["kl:mean"] == pytest.approx(0, abs=1e-6)
    assert max(float(g.abs().max()) for g in adapter.gradients or []) < 1e-4


def test_what_has_diverged_is_refused_and_nothing_accumulated(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("llama")
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0), 1)
    broken = random_adapter(model, LoraConfig(rank=3, seed=0), 1).snapshot()
    with torch.no_grad():
        broken.parameters()[0].fill_(float("nan"))
    with pytest.raises(BadRequest, match="not finite"):
        run(model, adapter, broken)
    assert adapter.gradients is None
