"""Training on a GPU: kernels against the formulas they stand for, recorded passes against unrecorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import group_data, random_adapter
from test_pass_graphs import dense_attention
from test_reverse_kl import finished
from test_trainer import train
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from mint.engine import layer_parts, layers, logprobs
from mint.engine.device import Device
from mint.engine.layer_parts import Linear, LowRank, Norm
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.shared_attention import FlashLayout, flash_attention
from mint.engine.trainer import Trainer
from mint.types import Datum, ForwardBackwardOutput, LoraConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def assert_alike(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], leaves: Sequence[Tensor], tolerance: float = 2e-3
) -> None:
    """The outputs, and their gradients; kernels multiply with ten bits where torch takes all of float32."""
    upstream = [torch.randn_like(out) for out in ours]
    for a, b in zip(ours, theirs, strict=True):
        assert gap(a, b) < tolerance
    found, expected = (torch.autograd.grad(outs, leaves, upstream) for outs in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert gap(a, b) < tolerance


def linears(inputs: int, *outputs: int, bias: bool = False) -> list[Linear]:
    return [Linear(normal(n, inputs) / inputs**0.5, normal(n) if bias else None) for n in outputs]


def adapted(rank: int, of: Sequence[Linear], on: Sequence[bool]) -> list[LowRank | None]:
    return [
        LowRank(
            normal(rank, weight.shape[1]).div_(weight.shape[1] ** 0.5).requires_grad_(),
            normal(len(weight), rank).div_(rank**0.5).requires_grad_(),
        )
        if chosen
        else None
        for (weight, *_), chosen in zip(of, on, strict=True)
    ]


def parameters(added: Sequence[LowRank | None]) -> list[Tensor]:
    return [half for low in added if low is not None for half in (low.down, low.up)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "norms", "rank", "on"),
    [
        (4, 2, 64, "plain", 16, "all"),
        (3, 1, 24, "plus one", 3, "all"),
        (2, 2, 128, "none", 64, "all"),
        (4, 2, 64, "plain", 80, "all"),
        (4, 2, 64, "plain", 8, "some"),
        (2, 2, 128, "none", 8, "none"),
    ],
)
def test_heads_are_made_as_the_formula_says(
    heads: int, kv_heads: int, head_dim: int, norms: str, rank: int, on: str
) -> None:
    from mint.engine import gpu_parts  # needs Triton

    torch.manual_seed(0)
    x, angles = normal(1077, 40).requires_grad_(), normal(1077, head_dim)
    of = linears(40, heads * head_dim, kv_heads * head_dim, kv_heads * head_dim, bias=norms == "none")
    added = adapted(rank, of, [on != "none", on != "none", on == "all"])
    both = None
    if norms != "none":
        both = (Norm(normal(head_dim), norms == "plus one", 1e-6), Norm(normal(head_dim), norms == "plus one", 1e-6))
    ours, theirs = (
        parts.heads_of(x, of, added, both, angles.cos(), angles.sin()) for parts in (gpu_parts, layer_parts)
    )
    assert_alike(ours, theirs, [x, *parameters(added)])


@pytest.mark.parametrize(("rank", "on"), [(3, "all"), (64, "all"), (80, "all"), (8, "some"), (8, "none")])
def test_the_mlp_is_as_the_formula_says(rank: int, on: str) -> None:
    from mint.engine import gpu_parts  # needs Triton

    torch.manual_seed(0)
    x = normal(1077, 80).requires_grad_()
    of = [*linears(80, 300, 300), *linears(300, 80)]
    added = adapted(rank, of, [on != "none", on != "none", on == "all"])
    ours, theirs = gpu_parts.silu_mlp(F.silu, x, of, added), layer_parts.mlp(F.silu, x, of, added)
    assert_alike([ours], [theirs], [x, *parameters(added)])
    still = x.detach()  # as the first layer's
    if on == "all":
        ours, theirs = gpu_parts.silu_mlp(F.silu, still, of, added), layer_parts.mlp(F.silu, still, of, added)
        assert_alike([ours], [theirs], parameters(added))


@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    [
        ([300, 77, 41, 1, 0], [300, 77, 41, 1, 0], None),
        ([130, 64, 20, 5], [130, 194, 214, 130], None),  # nodes of a tree
        ([300, 129, 20], [300, 140, 90], 50),
    ],
    ids=["roots", "tree", "window"],
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 128), (3, 1, 80), (2, 1, 256)])
def test_attention_over_nodes_is_that_of_each_alone(
    queries: list[int], keys: list[int], window: int | None, heads: int, kv_heads: int, head_dim: int
) -> None:
    from mint.engine import gpu_parts  # noqa: F401  (needs Triton)

    torch.manual_seed(0)
    starts = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda") for lengths in (queries, keys)]
    spans = [torch.empty(max(lengths), device="cuda") for lengths in (queries, keys)]
    layout = FlashLayout(*starts, keys_S=None, even=None, query_span=spans[0], key_span=spans[1])
    q, k, v = (
        normal(sum(rows), count, head_dim, dtype=torch.bfloat16).requires_grad_()
        for rows, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    )
    ours = flash_attention(layout, q, k, v, head_dim**-0.5, window)
    theirs = dense_attention(layout, q.float(), k.float(), v.float(), head_dim**-0.5, window)
    assert_alike([ours.float()], [theirs], [q, k, v], tolerance=0.01)


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 30.0)])
def test_powers_of_logits_are_those_of_the_formula(temperature: float, softcap: float | None) -> None:
    from mint.engine.kernels import training

    torch.manual_seed(0)
    products = 20 * normal(33, 9001)
    expected = logprobs._powers(products.clone(), temperature, softcap)
    for ours, theirs in zip(training.powers(products, temperature, softcap), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("inputs", "rank"), [(128, 16), (100, 3), (5000, 1)])
def test_inputs_are_widened_by_what_an_adapter_makes_of_them(inputs: int, rank: int) -> None:
    from mint.engine.kernels import training

    x, z = normal(33, inputs), normal(33, rank)
    assert torch.equal(training.widen(x, z), torch.cat([x, z], dim=1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return small_model(tmp_path_factory.mktemp("qwen3"))


def small_model(folder: Path, saved: torch.dtype = torch.float32) -> BaseModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=997, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=saved).save_pretrained(folder)
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
            adapter.gradients_P = None
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


def test_reverse_kl_agrees_with_the_layers_of_transformers(model: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "compiled", lambda function: function)
    keys = ("target_tokens", "weights")
    data = [Datum(d.model_input, {k: d.loss_fn_inputs[k] for k in keys}) for d in group_data(7, *SHAPES["groups"])]
    other = random_adapter(model, LoraConfig(rank=4, seed=3), 3).snapshot(model.dtype)
    ours, theirs = (random_adapter(model, LoraConfig(rank=8, seed=0)) for _ in range(2))
    found = finished(Trainer(model).reverse_kl(ours, other, data, data, 1.0))
    monkeypatch.setattr(model, "_fused", None)
    expected = finished(Trainer(model).reverse_kl(theirs, other, data, data, 1.0))
    for mine, reference in zip(found.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(mine["loss"].to_numpy(), reference["loss"].to_numpy(), atol=0.06)
    assert ours.gradients is not None and theirs.gradients is not None
    gaps = [float((a - b).norm() / b.norm()) for a, b in zip(ours.gradients, theirs.gradients, strict=True)]
    assert np.median(gaps) < 0.05


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
