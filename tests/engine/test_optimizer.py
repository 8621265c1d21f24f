from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import random_adapter

from mint.engine.lora import Adapter, joined
from mint.engine.model import BaseModel
from mint.engine.optimizer import AdamW
from mint.errors import BadRequest
from mint.types import AdamParams, LoraConfig


@pytest.fixture
def adapter(tiny_model: Callable[[str], BaseModel]) -> Adapter:
    return random_adapter(tiny_model("llama"), LoraConfig(rank=2, seed=0))


def draw_gradients(adapter: Adapter, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in adapter.parameters()]


def weights_of(adapter: Adapter) -> list[torch.Tensor]:
    return [p.detach().clone() for p in adapter.parameters()]


STEPS = [
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, weight_decay=0.3, grad_clip_norm=0.5),
    AdamParams(learning_rate=1e-2, betas=(0.8, 0.95), eps=1e-4, grad_clip_norm=1e9),
    AdamParams(learning_rate=5e-2, weight_decay=0.1),
]


def test_steps_are_those_of_torch_with_decay_clipping_and_changing_settings(adapter: Adapter) -> None:
    reference = [p.detach().clone().requires_grad_() for p in adapter.parameters()]
    theirs = torch.optim.AdamW(reference)
    ours = AdamW(adapter)
    for number, params in enumerate(STEPS):
        gradients = draw_gradients(adapter, number)
        adapter.accumulate(joined(gradients))
        metrics = ours.step(params)

        before = [p.detach().clone() for p in reference]
        for parameter, gradient in zip(reference, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(reference, params.grad_clip_norm or float("inf"))
        betas = (params.beta1, params.beta2)
        theirs.param_groups[0].update(
            lr=params.learning_rate, betas=betas, eps=params.eps, weight_decay=params.weight_decay
        )
        theirs.step()
        for mine, other in zip(adapter.parameters(), reference, strict=True):
            torch.testing.assert_close(mine, other, atol=2e-6, rtol=1e-5)
        moved = torch.cat([(p - b).detach().flatten() for p, b in zip(reference, before, strict=True)])
        assert metrics["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert metrics["optim/update_norm"] == pytest.approx(float(moved.norm()), rel=1e-3)
        assert (metrics["optim/step"], metrics["optim/lr"]) == (number + 1, params.learning_rate)
        assert metrics["optim/skipped"] == 0


def test_one_step_by_hand() -> None:
    weights = {"linear": (torch.tensor([[1.0]]), torch.tensor([[2.0]]))}
    adapter = Adapter("base", LoraConfig(rank=1), weights)
    adapter.accumulate(torch.tensor([0.5, -3.0]))
    AdamW(adapter).step(AdamParams(learning_rate=0.1, weight_decay=0.01, eps=0.0))
    # The first bias-corrected step is lr * sign(g), and decay takes lr * 0.01 of each weight.
    assert [p.item() for p in adapter.parameters()] == pytest.approx([1 - 0.1 - 0.001, 2 + 0.1 - 0.002])


def test_without_gradients_nothing_moves_not_even_by_momentum(adapter: Adapter) -> None:
    optimizer = AdamW(adapter)
    adapter.accumulate(joined(draw_gradients(adapter, 0)))
    optimizer.step(STEPS[0])
    before, state = weights_of(adapter), optimizer.state()
    metrics = optimizer.step(AdamParams(learning_rate=1.0, weight_decay=0.5))
    assert metrics["optim/skipped"] == 1
    assert all(torch.equal(w, b) for w, b in zip(adapter.parameters(), before, strict=True))
    assert all(torch.equal(t, state[name]) for name, t in optimizer.state().items())


def test_a_step_clears_the_gradients(adapter: Adapter) -> None:
    adapter.accumulate(joined(draw_gradients(adapter, 0)))
    AdamW(adapter).step(STEPS[0])
    assert adapter.gradients is None


def test_gradients_of_two_calls_add_up(adapter: Adapter) -> None:
    first, second = draw_gradients(adapter, 0), draw_gradients(adapter, 1)
    adapter.accumulate(joined(first))
    adapter.accumulate(joined(second))
    assert adapter.gradients is not None
    for total, a, b in zip(adapter.gradients, first, second, strict=True):
        torch.testing.assert_close(total, a + b)
    torch.testing.assert_close(first, draw_gradients(adapter, 0), msg="what was given is not written to")


def test_state_goes_out_and_in_so_that_the_next_step_is_the_same(tiny_model: Callable[[str], BaseModel]) -> None:
    one, other = (random_adapter(tiny_model("llama"), LoraConfig(rank=2, seed=0)) for _ in range(2))
    optimizer = AdamW(one)
    for number in range(2):
        one.accumulate(joined(draw_gradients(one, number)))
        optimizer.step(STEPS[number])
    with torch.no_grad():
        for target, source in zip(other.parameters(), one.parameters(), strict=True):
            target.copy_(source)
    restored = AdamW(other)
    restored.load_state(optimizer.state())
    for adapter, adamw in ((one, optimizer), (other, restored)):
        adapter.accumulate(joined(draw_gradients(one, 9)))
        adamw.step(STEPS[2])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    restored.reset()
    assert restored.steps == 0 and not any(t.any() for t in restored.state().values())


def test_a_state_of_another_adapter_is_refused(adapter: Adapter, tiny_model: Callable[[str], BaseModel]) -> None:
    other = AdamW(random_adapter(tiny_model("llama"), LoraConfig(rank=3, seed=0)))
    with pytest.raises(BadRequest, match=r"first amiss is model\.layers\.0\.self_attn\.q_proj\.A\.mean"):
        AdamW(adapter).load_state(other.state())
    with pytest.raises(BadRequest, match="has 1 tensors"):
        AdamW(adapter).load_state({"step": torch.tensor(1)})
