"""Weights packed in bfloat16, where they are such numbers anyhow, give the bits of weights packed in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import random_adapter, random_tokens
from test_native import adapters_of, ask, requests
from test_native_training import wide
from transformers import AutoModelForCausalLM

from mint.engine.model import BaseModel
from mint.engine.native import library, weights
from mint.engine.sampler.sampler import Sampler
from mint.types import LoraConfig, ModelInput, SampleRequest, SamplingParams

pytestmark = pytest.mark.skipif(library.library().functions is None, reason=library.library().reason)
Both = tuple[BaseModel, BaseModel]


def published(folder: Path) -> Path:
    """In bfloat16; of several panels, one of them narrow, and with biases."""
    wide(folder / "float32", "qwen2", vocab_size=200)
    AutoModelForCausalLM.from_pretrained(folder / "float32", dtype=torch.bfloat16).save_pretrained(folder / "published")
    return folder / "published"


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, cached_bytes: int, halved: bool) -> BaseModel:
    monkeypatch.setattr(weights, "CACHED_BYTES", cached_bytes)
    model = BaseModel.load(str(folder))
    assert model.packed is not None and model.packed.halved is halved
    return model


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Both:
    """The same model, packed as bfloat16 too and as float32 alone."""
    folder = published(tmp_path)
    return loaded(folder, monkeypatch, 0, halved=True), loaded(folder, monkeypatch, 2**40, halved=False)


@pytest.mark.parametrize("samples", [1, 6, 7, 16, 40])
def test_samples(samples: int, both: Both) -> None:
    """By one row and by a whole tile of them, by several tiles, and by so many that floats are read."""
    params = SamplingParams(max_tokens=9, seed=1, stop=[])
    request = SampleRequest(ModelInput.from_ints(random_tokens(np.random.default_rng(0), 50)), params, samples)
    answers = [
        ask(Sampler(model), [(request, adapter)])[0]
        for model in both
        for adapter in [random_adapter(model, LoraConfig(rank=4, seed=1))]
    ]
    for ours, theirs in zip(*(answer.sequences for answer in answers), strict=True):
        assert (ours.tokens, ours.logprobs) == (theirs.tokens, theirs.logprobs)


def test_samples_of_several_adapters_with_scores_and_filters(both: Both) -> None:
    answers = [ask(Sampler(model), requests(np.random.default_rng(4), adapters_of(model))) for model in both]
    for ours, theirs in zip(*answers, strict=True):
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        assert [s.tokens for s in ours.sequences] == [s.tokens for s in theirs.sequences]
        assert [s.logprobs for s in ours.sequences] == [s.logprobs for s in theirs.sequences]


def test_who_is_packed_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]) -> None:
    """Not a model that would lose by it, nor one that caches may hold as it is."""
    cached_bytes = weights.CACHED_BYTES
    loaded(tiny_folder("llama"), monkeypatch, 0, halved=False)
    loaded(published(tmp_path), monkeypatch, cached_bytes, halved=False)
