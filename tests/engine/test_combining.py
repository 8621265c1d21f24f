"""Sums of saved adapters, against the base model with the sum of their products added to its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import logits, plain_model, random_adapter, random_tokens
from test_sampler import SMALL, TOLERANCE, request, run

from mint.engine import checkpoint
from mint.engine.combining import combine
from mint.engine.engine import Engine
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.sampler.sampler import Sampler
from mint.errors import BadRequest
from mint.types import LoraConfig


def saved(folder: Path, *adapters: Adapter) -> list[str]:
    for n, adapter in enumerate(adapters):
        checkpoint.save(folder / str(n), adapter)
    return [str(folder / str(n)) for n in range(len(adapters))]


def test_the_sum_is_that_of_what_each_adds_to_the_weights(
    model: BaseModel, tiny_folder: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    """Different ranks, different linears, a negative coefficient."""
    configs = [LoraConfig(rank=4, seed=1), LoraConfig(rank=2, seed=2, train_mlp=False, train_unembed=False)]
    adapters = [random_adapter(model, config, seed) for seed, config in enumerate(configs)]
    coefficients = [0.7, -1.5]
    lora = combine(saved(tmp_path, *adapters), coefficients, str(tmp_path / "sum"))
    assert (lora.rank, lora.train_mlp, lora.train_unembed) == (6, True, True)

    reference = plain_model(tiny_folder(family))
    if reference.config.tie_word_embeddings:  # the adapter of the unembedding leaves the embedding alone
        reference.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.clone())
    with torch.no_grad():
        for adapter, coefficient in zip(adapters, coefficients, strict=True):
            for path, (down, up) in adapter.weights.items():
                reference.get_submodule(path).weight += coefficient * adapter.scale * (up @ down)
        prompt = random_tokens(np.random.default_rng(0), 20)
        expected = torch.log_softmax(logits(reference, prompt).double(), -1)[range(19), prompt[1:]]
    policy = checkpoint.read(tmp_path / "sum").policy(model.linears)
    (response,) = run(Sampler(model, SMALL), (policy, request(prompt, max_tokens=1, prompt_logprobs=True)))
    np.testing.assert_allclose(response.prompt_logprobs[1:], expected, atol=TOLERANCE)  # type: ignore[index]


def test_one_adapter_times_one_is_itself(tiny_model: Callable[[str], BaseModel], tmp_path: Path) -> None:
    model = tiny_model("llama")
    adapter = random_adapter(model, LoraConfig(rank=3, seed=1), 1)
    combine(saved(tmp_path, adapter), [1.0], str(tmp_path / "sum"))
    same = checkpoint.read(tmp_path / "sum")
    for path, (down, up) in adapter.weights.items():
        torch.testing.assert_close(same.weights[path], (down.detach(), up.detach() * adapter.scale))
    assert same.config.rank == 3


def test_what_cannot_be_added_up_is_refused(tiny_model: Callable[[str], BaseModel], tmp_path: Path) -> None:
    llama, qwen = tiny_model("llama"), tiny_model("qwen3")
    small, other = random_adapter(llama, LoraConfig(rank=2, seed=1), 1), random_adapter(qwen, LoraConfig(rank=2), 2)
    with pytest.raises(BadRequest, match="different base models"):
        combine(saved(tmp_path, small, other), [1.0, 1.0], str(tmp_path / "sum"))
    wide = saved(tmp_path, random_adapter(llama, LoraConfig(rank=600, seed=1), 1))
    with pytest.raises(BadRequest, match="add up to 1200; at most 1024"):
        combine(wide * 2, [0.5, 0.5], str(tmp_path / "sum"))
    assert not (tmp_path / "sum").exists()


def test_the_engine_combines_and_samples_what_it_combined(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = str(tiny_folder("qwen3"))
    engine = Engine([base])
    try:
        engine.create_adapter("a", base, LoraConfig(rank=4, seed=0)).result(60)
        engine.save_adapter("a", str(tmp_path / "a"), False).result(60)
        lora = engine.combine([str(tmp_path / "a")] * 2, [0.5, 0.5], str(tmp_path / "sum")).result(60)
        assert lora.rank == 8
        engine.load_policy("p", base, str(tmp_path / "sum")).result(60)
        assert engine.sample("p", request([5, 6, 7])).result(60).sequences
        with pytest.raises(Exception, match="no checkpoint folder"):
            engine.combine([str(tmp_path / "gone")], [1.0], str(tmp_path / "no")).result(60)
    finally:
        engine.close()
