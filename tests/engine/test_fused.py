"""Layers with fused projections compute what transformers' modules compute, from the same storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import random_adapter
from torch import nn

from mint.engine.attention import PackedAttention
from mint.engine.fused import FusedDecoder, padded
from mint.engine.model import BaseModel
from mint.engine.sampler import gathered
from mint.engine.sampler.drawing import Drawn
from mint.engine.sampler.limits import Limits
from mint.engine.sampler.runner import Runner
from mint.engine.sampler.sampler import Sampler
from mint.engine.sampler.torch_reader import TorchReader
from mint.types import LoraConfig, ModelInput, SampleRequest, SampleResponse, SamplingParams


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_plain"])
def test_fused_layers_equal_the_modules_with_several_adapters_in_one_pass(
    family: str, tiny_model: Callable[[str], BaseModel]
) -> None:
    model = tiny_model(family)
    fused = model.fused
    assert fused is not None
    partial = random_adapter(model, LoraConfig(rank=3, seed=3, train_mlp=False, train_unembed=False), 3)
    rows = [(random_adapter(model, LoraConfig(rank=5, seed=1), 1), 9), (None, 4), (partial, 7)]
    tokens, positions = torch.arange(20), torch.cat([torch.arange(9), torch.arange(4), torch.arange(7)])
    attend = PackedAttention([9, 4, 7])
    with torch.no_grad():
        theirs = model.hidden(tokens, positions, attend, rows)
        ours = fused.hidden(tokens, positions, attend, rows)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fused.logits(theirs, rows), model.logits(theirs, rows), rtol=1e-4, atol=1e-4)


def test_the_linears_of_training_are_views_of_the_fused_weights(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("qwen3")
    fused = model.fused
    assert fused is not None
    for layer in fused.layers:
        for projection in layer.projections:
            start = projection.weight_OI.data_ptr()
            for path, size in zip(projection.paths, projection.sizes, strict=True):
                weight = model.linears[path].weight
                assert weight.data_ptr() == start and weight.shape[0] == size
                start += weight.nbytes


def test_a_model_with_a_softcap_keeps_its_modules(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("gemma3")
    assert model.softcap is not None and model.fused is None


def test_a_model_that_is_not_what_its_family_is_keeps_its_modules(
    tiny_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = BaseModel.load(str(tiny_folder("llama")))
    model._decoder.layers[1].mlp.act_fn = nn.GELU()
    assert FusedDecoder.of(model, model._module) is None
    assert "differs from the layers of its family" in caplog.text


def test_runs_are_filled_up_to_whole_multiples() -> None:
    runs, places = padded([(None, 3), (None, 8), (None, 1)], 4)
    assert [count for _, count in runs] == [4, 8, 4]
    assert places == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]


def samples(model: BaseModel) -> list[SampleResponse]:
    """Requests of different lengths that come and go."""
    sampler = Sampler(model, Limits(4, 200, 200, 16, 32))
    sampler.runner = Runner(model, TorchReader(model, 4))
    found: dict[int, SampleResponse] = {}
    for n, (prompt, max_tokens) in enumerate([(5, 20), (17, 9), (3, 30), (30, 12)]):
        params = SamplingParams(max_tokens=max_tokens, seed=n, stop=[])
        request = SampleRequest(ModelInput.from_ints(list(range(prompt))), params, 2)
        sampler.add(request, None, lambda answer, n=n: found.__setitem__(n, answer))  # type: ignore[misc]
        sampler.step()
        sampler.step()
    while sampler.step():
        pass
    return [found[n] for n in range(4)]


def test_kept_keys_and_values_give_the_same_bits_as_gathering_them_every_step(
    model: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = samples(model)
    monkeypatch.setattr(gathered, "MOST_BYTES", 0)
    assert samples(model) == kept


def test_tokens_behind_a_stop_in_one_step_are_nobodys(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner may draw several tokens before anybody looks at them."""
    sampler, found = Sampler(tiny_model("llama")), []
    bursts = iter([[3], [4, 9, 5, 6]])

    def run(plan: object) -> list[Drawn]:
        tokens = next(bursts)
        return [Drawn(work.sequence, tokens, [-1.0] * len(tokens)) for work in plan.work]  # type: ignore[attr-defined]

    monkeypatch.setattr(sampler.runner, "run", run)
    heard: list[list[int]] = []
    sampler.add(
        SampleRequest(ModelInput.from_ints([1, 2]), SamplingParams(max_tokens=20, stop=[9])), None, found.append,
        on_tokens=lambda index, tokens, logprobs: heard.append(list(tokens)),
    )  # fmt: skip
    while sampler.step():
        pass
    (sequence,) = found[0].sequences
    assert (sequence.tokens, sequence.stop_reason) == ([3, 4, 9], "stop")
    assert heard == [[3], [4, 9]] and sampler.tokens_sampled == 3
