"""What a token computes does not depend on its company: to the last bit, on the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import random_adapter, random_tokens

from mint.engine import steady
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.process import make_engine
from mint.engine.sampler.limits import Limits
from mint.engine.sampler.runners import runner_for
from mint.engine.sampler.sampler import Sampler
from mint.errors import BadRequest
from mint.types import LoraConfig, ModelInput, SampleRequest, SampleResponse, SamplingParams

Answers = list[SampleResponse]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------ the two rules


@pytest.mark.parametrize("shape", [(128, 384), (128, 1), (3, 128), (576, 264), (1024, 16)])
def test_rows_in_multiples_give_every_row_the_same_sums(shape: tuple[int, int], threads: int) -> None:
    x, weight = torch.randn(96, shape[0]), torch.randn(shape[1], shape[0])
    whole = F.linear(x, weight)
    for count in (1, 2, 3, 5, 8, 13, 31, 64):
        for start in (0, 7, 32):
            alone = F.linear(steady.pad_rows(x[start : start + count], steady.ROWS), weight)[:count]
            assert torch.equal(alone, whole[start : start + count]), (count, start)


@pytest.mark.parametrize("size", [8, 32, 128])
def test_widths_of_keys_give_every_length_the_same_sums(size: int, threads: int) -> None:
    longest = 1100
    q, k, v = torch.randn(1, 1, 8, size), torch.randn(1, 1, longest, size), torch.randn(1, 1, longest, size)

    def attend(keys: int, company: int) -> torch.Tensor:
        slots = steady.key_slots(company)
        padded = [steady.pad_rows(x[:, :, :slots], slots, dim=2) for x in (k, v)]
        mask = torch.where(torch.arange(slots) < keys, 0.0, -torch.inf)[None]
        return F.scaled_dot_product_attention(q, *padded, attn_mask=mask)

    for keys in (1, 15, 100, 190, 193, 200, 300, 390, 512, 513, 700, 800):
        alone = attend(keys, keys)
        for company in (keys + 16, keys + 100, 1023, 1090):
            assert torch.equal(attend(keys, max(keys, company)), alone), (keys, company)


def test_the_widths_are_at_most_twice_the_keys_and_whole_blocks() -> None:
    for keys in range(1, 3000):
        assert keys <= steady.key_slots(keys) <= max(16, 2 * keys)
        assert steady.key_slots(keys) % steady.KEYS == 0
        assert steady.key_slots(keys) <= steady.key_slots(keys + 1)


def test_only_float32_on_the_cpu_pays_for_it() -> None:
    assert steady.row_multiple(torch.device("cpu"), torch.float32) == steady.ROWS
    assert steady.row_multiple(torch.device("cpu"), torch.bfloat16) == 1
    assert steady.row_multiple(torch.device("cuda"), torch.float32) == 1


# ------------------------------------------------------------------------------------------------ the sampler


def answers(sampler: Sampler, asked: list[tuple[SampleRequest, Adapter | None]], stagger: int = 0) -> Answers:
    """The answers, in the order of the questions; each enters `stagger` steps after the one before."""
    found: dict[int, SampleResponse] = {}
    for n, (request, adapter) in enumerate(asked):
        sampler.add(request, adapter, lambda answer, n=n: found.__setitem__(n, answer))  # type: ignore[misc]
        for _ in range(stagger):
            sampler.step()
    while sampler.has_work:
        sampler.step()
    return [found[n] for n in range(len(asked))]


def ask(tokens: list[int], samples: int, max_tokens: int, seed: int) -> SampleRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop=[], temperature=1.3)
    return SampleRequest(ModelInput.from_ints(tokens), params, samples, prompt_logprobs=True)


@pytest.mark.parametrize("budget", [512, 7])
def test_a_sample_is_the_same_to_the_last_bit_whoever_else_is_sampled(
    model: BaseModel, budget: int, rng: np.random.Generator
) -> None:
    """Other prompts and adapters, prompts read in pieces, cached prefixes, and places lost to others."""
    adapters = [None, *(random_adapter(model, LoraConfig(rank=rank, seed=1), rank) for rank in (1, 5, 16))]
    asked = [(ask(random_tokens(rng, n), 3, 9, n), adapters[n % 4]) for n in (2, 5, 17, 18, 33, 40)]
    crowd = [(ask(random_tokens(rng, n), 2, 12, n), adapters[n % 3]) for n in (1, 3, 20, 31, 47, 50)]
    alone = [answers(Sampler(model), [one])[0] for one in asked]
    tight = Limits(block_size=16, blocks=14, max_blocks=14, token_budget=budget, max_sequences=64)
    mixed = [pair for both in zip(asked, crowd, strict=True) for pair in both]
    sampler = Sampler(model, tight)
    for stagger in (0, 3, 0):
        together = answers(sampler, mixed, stagger)[::2]
        for one, other in zip(alone, together, strict=True):
            assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
            assert [s.logprobs for s in one.sequences] == [s.logprobs for s in other.sequences]
            assert one.prompt_logprobs == other.prompt_logprobs


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_reading_a_prompt_in_any_pieces_gives_the_same_bits(
    tiny_model: Callable[[str], BaseModel], rng: np.random.Generator
) -> None:
    """Up to long prompts, where attention sums over several runs of keys."""
    model = tiny_model("long")
    adapter = random_adapter(model, LoraConfig(rank=3, seed=1))
    request = ask(random_tokens(rng, 700), 2, 30, 0)
    found = []
    for budget in (512, 1000, 160, 33):
        limits = Limits(block_size=16, blocks=200, max_blocks=200, token_budget=budget, max_sequences=8)
        found.append(answers(Sampler(model, limits), [(request, adapter)])[0])
    for other in found[1:]:
        assert other.prompt_logprobs == found[0].prompt_logprobs
        assert other.sequences == found[0].sequences


def test_the_flag_of_the_server_reaches_the_device(tiny_folder: Callable[[str], Path]) -> None:
    for asked in (False, True):
        engine = make_engine([str(tiny_folder("qwen3"))], deterministic=asked)
        try:
            assert engine._runtimes._device.steady is asked  # type: ignore[attr-defined]
        finally:
            engine.close()


def test_a_gpu_model_that_cannot_be_sampled_steadily_is_refused(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("gemma3")
    monkeypatch.setattr(model, "fixed_rows", 256)  # as a steady GPU has it
    with pytest.raises(BadRequest, match=r"cannot be sampled deterministically on this GPU.*without --deterministic"):
        runner_for(model, 16)
