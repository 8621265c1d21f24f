"""Training on a GPU: kernels against the formulas they stand for, recorded passes against unrecorded ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import group_data, random_adapter
from test_trainer import train
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from mint.engine import layer_parts, layers
from mint.engine.device import Device
from mint.engine.layer_parts import Norm
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.trainer import Trainer
from mint.types import ForwardBackwardOutput, LoraConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def gradient(out: tuple[Tensor, ...], x: Tensor) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    total = sum((part * torch.randn(part.shape, generator=generator, device="cuda")).sum() for part in out)
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, x)[0]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norms"), [(4, 2, 64, "plain"), (3, 1, 24, "plus one"), (2, 2, 128, "none")]
)
def test_heads_are_turned_as_the_formula_says(heads: int, kv_heads: int, head_dim: int, norms: str) -> None:
    from mint.engine.kernels import training  # noqa: F401  (needs Triton)

    torch.manual_seed(0)
    x = normal(77, (heads + 2 * kv_heads) * head_dim).requires_grad_()
    angles = normal(77, head_dim)
    both = None
    if norms != "none":
        both = (Norm(normal(head_dim), norms == "plus one", 1e-6), Norm(normal(head_dim), norms == "plus one", 1e-6))
    made = [
        turn(x, both, angles.cos(), angles.sin(), heads, kv_heads)
        for turn in (layer_parts.turn_heads_on_gpu, layer_parts.turn_heads)
    ]
    for mine, theirs in zip(*made, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradient(made[0], x), gradient(made[1], x), atol=1e-4, rtol=1e-4)


def test_the_gate_has_the_gradient_of_the_formula() -> None:
    from mint.engine.kernels import training  # noqa: F401  (needs Triton)

    torch.manual_seed(0)
    x = normal(33, 2 * 1100).requires_grad_()
    ours, theirs = (layer_parts.silu_gate_on_gpu(F.silu, x), layer_parts.gate(F.silu, x))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradient((ours,), x), gradient((theirs,), x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("inputs", "rank"), [(128, 16), (100, 3), (5000, 1)])
def test_inputs_are_widened_by_what_an_adapter_makes_of_them(inputs: int, rank: int) -> None:
    from mint.engine.kernels import training

    x, z, scale = normal(33, inputs), normal(33, rank), torch.full((), 2.5, device="cuda")
    assert torch.equal(training.widen(x, z, scale), torch.cat([x, z * scale], dim=1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=997, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen3")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return BaseModel.load(str(folder), Device(torch.device("cuda"), torch.bfloat16, "asked for"))


def assert_near(found: ForwardBackwardOutput, mine: Adapter, expected: ForwardBackwardOutput, theirs: Adapter) -> None:
    """As near as two runs of attention's backward pass, whose sums have no order on a GPU."""
    for ours, reference in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(ours["logprobs"].to_numpy(), reference["logprobs"].to_numpy(), atol=1e-3)
    assert mine.gradients is not None and theirs.gradients is not None
    for a, b in zip(mine.gradients, theirs.gradients, strict=True):
        assert float((a - b).norm()) <= 0.03 * float(b.norm()) + 1e-6


SHAPES = {
    "ragged": ([0] * 5, [[300], [77], [41], [120], [5]]),
    "groups": ([60, 100], [[30, 44, 11], [70, 20, 33]]),
    "even": ([0] * 6, [[64]] * 6),
}


def assert_recordings_agree(model: BaseModel, shape: str, lean: bool = False, unembed: bool = False) -> None:
    recorded, plain = Trainer(model, lean=lean), Trainer(model, lean=lean)
    plain._run._usable = False
    for n, rank in enumerate((8, 8, 8, 4, 4)):
        data = group_data(n, *SHAPES[shape])
        config = LoraConfig(rank=rank, seed=n, train_unembed=unembed)
        mine, theirs = (random_adapter(model, config, n) for _ in range(2))
        found, expected = train(recorded, mine, data), train(plain, theirs, data)
        assert_near(found, mine, expected, theirs)
    assert len(recorded._run._recorded) >= 2
    recorded._run.give_back()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("unembed", [False, True], ids=["layers", "unembedding too"])
@pytest.mark.parametrize("lean", [False, True], ids=["keeping", "lean"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_recorded_pass_gives_what_an_unrecorded_one_gives(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch, lean: bool, shape: str, unembed: bool
) -> None:
    monkeypatch.setattr(layers, "compiled", lambda function: function)  # compiling takes longer than all the rest
    assert_recordings_agree(model, shape, lean, unembed)


def test_a_recorded_pass_of_compiled_layers_gives_what_an_unrecorded_one_gives(model: BaseModel) -> None:
    assert_recordings_agree(model, "ragged")


def test_recorded_micro_batches_of_two_tenants_by_turns_are_those_of_each_alone(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "compiled", lambda function: function)
    data = [group_data(n, [0] * 6, [[100 + 10 * n], [90], [80], [70], [60], [50]]) for n in range(2)]
    alone, together = ([random_adapter(model, LoraConfig(rank=8, seed=n), n) for n in range(2)] for _ in range(2))
    trainer = Trainer(model, token_budget=256)
    for _ in range(2):
        expected = [train(trainer, adapter, mine) for adapter, mine in zip(alone, data, strict=True)]
        for adapter in (*alone, *together):
            adapter.gradients = None
    expected = [train(trainer, adapter, mine) for adapter, mine in zip(alone, data, strict=True)]
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
                found[n] = found[n] or done.value
    for n in range(2):
        answer = found[n]
        assert answer is not None
        assert_near(answer, together[n], expected[n], alone[n])


def test_training_agrees_with_the_layers_of_transformers(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "compiled", lambda function: function)
    data = group_data(7, *SHAPES["ragged"])
    ours, theirs = (random_adapter(model, LoraConfig(rank=8, seed=0)) for _ in range(2))
    found = train(Trainer(model), ours, data)
    monkeypatch.setattr(model, "_fused", None)
    expected = train(Trainer(model), theirs, data)
    for mine, reference in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(mine["logprobs"].to_numpy(), reference["logprobs"].to_numpy(), atol=0.06)
    assert ours.gradients is not None and theirs.gradients is not None
    gaps = [float((a - b).norm() / b.norm()) for a, b in zip(ours.gradients, theirs.gradients, strict=True)]
    assert np.median(gaps) < 0.05
