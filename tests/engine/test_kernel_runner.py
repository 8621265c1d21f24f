"""The sampler in kernels of its own gives what the sampler in plain torch gives. Needs a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import random_adapter, random_tokens
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from mint.engine.device import Device
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.sampler import sampler as sampler_module
from mint.engine.sampler.limits import Limits
from mint.engine.sampler.runner import Runner
from mint.engine.sampler.sampler import Sampler
from mint.engine.sampler.torch_reader import TorchReader
from mint.errors import Internal
from mint.types import LoraConfig, ModelInput, SampleRequest, SampleResponse, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

COMMON = dict(
    vocab_size=5000, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.08, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, tie_word_embeddings=False),
    "qwen2": Qwen2Config(
        **COMMON, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**COMMON, tie_word_embeddings=True, head_dim=64),
    "gemma3": Gemma3TextConfig(
        **COMMON,
        head_dim=64,
        query_pre_attn_scalar=50,
        sliding_window=30,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
Asked = list[tuple[SampleRequest, Adapter | None]]


def load(family: str, folder: Path, device: Device) -> BaseModel:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    return BaseModel.load(str(folder), device)


def cuda(dtype: torch.dtype, steady: bool = False) -> Device:
    return Device(torch.device("cuda"), dtype, "asked for", steady)


def answers(sampler: Sampler, asked: Asked) -> list[SampleResponse]:
    found: dict[int, SampleResponse] = {}
    for n, (request, adapter) in enumerate(asked):
        sampler.add(request, adapter, lambda answer, n=n: found.__setitem__(n, answer))  # type: ignore[misc]
    while sampler.has_work:
        sampler.step()
    return [found[n] for n in range(len(asked))]


def ask(tokens: list[int], samples: int = 1, max_tokens: int = 20, **extras: object) -> SampleRequest:
    params = {"temperature": 1.0, "seed": len(tokens), "stop": []}
    params |= {name: extras.pop(name) for name in list(extras) if name in SamplingParams.__dataclass_fields__}
    return SampleRequest(
        ModelInput.from_ints(tokens), SamplingParams(max_tokens=max_tokens, **params), samples, **extras
    )  # type: ignore[arg-type]


def mixed(model: BaseModel) -> Asked:
    """Groups, long prompts, every kind of draw, five adapters of different ranks and the base model."""
    rng = np.random.default_rng(0)
    adapters = [None, *(random_adapter(model, LoraConfig(rank=r, seed=r), r) for r in (1, 5, 16, 40))]
    adapters.append(random_adapter(model, LoraConfig(rank=8, seed=9, train_unembed=False, train_mlp=False), 9))

    def tokens(count: int) -> list[int]:
        return random_tokens(rng, count)

    return [
        (ask(tokens(3), 20), adapters[1]),
        (ask(tokens(40), 2, temperature=0.7), adapters[2]),
        (ask(tokens(20), 3, temperature=0.0, prompt_logprobs=True), adapters[3]),
        (ask(tokens(700), 2, 30), adapters[4]),
        (ask(tokens(17), 2, prompt_logprobs=True), adapters[0]),
        (ask(tokens(33), 4, 9), adapters[5]),
    ]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says which of the two runners samplers made from now on use."""
    ours = sampler_module.runner_for

    def plain(model: BaseModel, block_size: int) -> Runner:
        return Runner(model, TorchReader(model, block_size))

    def choose(kernels: bool) -> None:
        monkeypatch.setattr(sampler_module, "runner_for", ours if kernels else plain)

    return choose


def both(model: BaseModel, asked: Asked, choose: Callable[[bool], None]) -> tuple[list[SampleResponse], ...]:
    found = []
    for kernels in (False, True):
        choose(kernels)
        sampler = Sampler(model, Limits(16, 2000, 2000, 256, 128))
        assert isinstance(sampler.runner, Runner) != kernels
        found.append(answers(sampler, asked))
    return tuple(found)


def gaps(one: SampleResponse, other: SampleResponse) -> np.ndarray:
    """Between the log-probs of the tokens both drew, up to the first that differs, and of the prompt."""
    found = []
    for a, b in zip(one.sequences, other.sequences, strict=True):
        assert a.logprobs is not None and b.logprobs is not None
        same = [x == y for x, y in zip(a.tokens, b.tokens, strict=True)]
        count = same.index(False) if False in same else len(same)
        found += [abs(p - q) for p, q in zip(a.logprobs[:count], b.logprobs[:count], strict=True)]
    for p, q in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
        found.append(abs((p or 0.0) - (q or 0.0)))
    return np.array(found)


def parted(one: SampleResponse, other: SampleResponse) -> int:
    """How many sequences drew other tokens from some place on. There a uniform number lay where one token ends and the
    next begins, so that rounding decided: they are neighbours, and all before them are the same."""
    count = 0
    for mine, theirs in zip(one.sequences, other.sequences, strict=True):
        pairs = zip(mine.tokens, theirs.tokens, strict=True)
        if (first := next(((a, b) for a, b in pairs if a != b), None)) is not None:
            assert abs(first[0] - first[1]) == 1
            count += 1
    return count


@pytest.mark.parametrize("family", CONFIGS)
def test_in_float32_both_draw_the_same_tokens(family: str, tmp_path: Path, runner: Callable[[bool], None]) -> None:
    model = load(family, tmp_path, cuda(torch.float32))
    torch.backends.cuda.matmul.allow_tf32 = False
    for one, other in zip(*both(model, mixed(model), runner), strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        assert gaps(one, other).max() < 2e-3


@pytest.mark.parametrize("family", CONFIGS)
def test_in_bfloat16_both_agree_within_rounding(family: str, tmp_path: Path, runner: Callable[[bool], None]) -> None:
    model = load(family, tmp_path, cuda(torch.bfloat16))
    found = np.concatenate([gaps(one, other) for one, other in zip(*both(model, mixed(model), runner), strict=True)])
    assert len(found) > 50
    assert found.mean() < 0.02 and found.max() < 0.3


@pytest.mark.parametrize("samples", [1, 20, 50, 100])
def test_rows_of_one_policy_agree_however_many_there_are(
    samples: int, tmp_path: Path, runner: Callable[[bool], None]
) -> None:
    everywhere = LoraConfig(rank=12, seed=3)
    configs = [everywhere, replace(everywhere, train_attn=False, train_mlp=False)]
    for dtype, config in product((torch.float32, torch.bfloat16), configs):
        model = load("qwen3", tmp_path, cuda(dtype))
        torch.backends.cuda.matmul.allow_tf32 = False
        adapter = random_adapter(model, config, 3)
        for one, other in zip(*both(model, [(ask(list(range(9)), samples), adapter)], runner), strict=True):
            if dtype == torch.float32:
                assert parted(one, other) <= samples // 50  # of 20 draws each
            assert gaps(one, other).mean() < 0.02


def test_a_policy_of_another_rank_finds_nothing_left_of_the_one_before(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path, cuda(torch.float32))
    wide, narrow = (random_adapter(model, LoraConfig(rank=r, seed=r), r) for r in (32, 3))
    for matrix in chain.from_iterable(wide.weights.values()):
        matrix.detach().fill_(float("nan"))
    asked = [(ask(list(range(9)), 3), narrow)]
    alone, sampler = answers(Sampler(model), asked), Sampler(model)
    heard: list[object] = []
    sampler.add(ask(list(range(7)), 1), wide, heard.append)
    while sampler.has_work:
        sampler.step()
    assert isinstance(heard[0], Internal), "its logits are no numbers"
    assert [s.logprobs for s in answers(sampler, asked)[0].sequences] == [s.logprobs for s in alone[0].sequences]


def test_the_base_model_beside_a_policy_that_diverged_draws_as_if_it_were_alone(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path, cuda(torch.float32))
    diverged = random_adapter(model, LoraConfig(rank=16, seed=1), 1)
    for matrix in chain.from_iterable(diverged.weights.values()):
        matrix.detach().fill_(float("nan"))
    sampler, base = Sampler(model), (ask(list(range(9)), 3), None)
    heard: list[object] = []
    sampler.add(ask(list(range(7)), 2), diverged, heard.append)
    (beside,) = answers(sampler, [base])
    (alone,) = answers(Sampler(model), [base])
    assert isinstance(heard[0], Internal)
    assert [s.tokens for s in beside.sequences] == [s.tokens for s in alone.sequences]
    assert gaps(beside, alone).max() < 1e-3


def test_filtered_draws_run_in_bursts(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path, cuda(torch.bfloat16))
    sampler, steps = Sampler(model), 0
    sampler.add(ask(list(range(9)), 4, 33, top_p=0.9, top_k=40), None, lambda answer: None)
    while sampler.has_work:
        sampler.step()
        steps += 1
    assert steps == 5  # the prompt with the first token, and four times eight


def test_first_tokens_that_nobody_goes_on_from_may_fill_a_piece_of_the_logits(
    tmp_path: Path, runner: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four want one token, in the first piece; four more, whose next ones are drawn before the host has seen these."""
    from mint.engine.sampler import kernel_runner

    monkeypatch.setattr(kernel_runner, "LOGITS_PIECE", 4 * COMMON["vocab_size"])
    model = load("llama", tmp_path, cuda(torch.float32))
    asked: Asked = [(ask([n + 3] * 20, 1, tokens), None) for n, tokens in enumerate([1] * 4 + [9] * 4)]
    for one, other in zip(*both(model, asked, runner), strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]


def test_truncated_draws_and_the_likeliest_tokens_are_the_same(tmp_path: Path, runner: Callable[[bool], None]) -> None:
    model = load("qwen3", tmp_path, cuda(torch.float32))
    asked: Asked = [
        (ask(list(range(10)), 3, top_p=0.8), None),
        (ask(list(range(20)), 2, top_k=3, topk_sample_logprobs=4), None),
        (ask(list(range(30)), 2, 40), None),
    ]
    for one, other in zip(*both(model, asked, runner), strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        for a, b in zip(one.sequences, other.sequences, strict=True):
            for row, same in zip(a.topk_logprobs or [], b.topk_logprobs or [], strict=True):
                assert [token for token, _ in row] == [token for token, _ in same]


def test_steered_draws_are_the_same_and_change_nothing_for_others(
    tmp_path: Path, runner: Callable[[bool], None]
) -> None:
    model = load("qwen3", tmp_path, cuda(torch.float32))
    steered: Asked = [
        (ask(list(range(10)), 3, repetition_penalty=1.6), None),
        (ask(list(range(20)), 2, frequency_penalty=1.5, presence_penalty=0.5, top_k=9, topk_sample_logprobs=2), None),
        (ask(list(range(15)), 2, logit_bias={3: 4.0, 4: -100.0}), None),
    ]
    plain: Asked = [(ask(list(range(30)), 2, 40), None)]
    ours, reference = both(model, [*steered, *plain], runner)
    assert sum(parted(one, other) for one, other in zip(ours, reference, strict=True)) <= 1
    assert max(gaps(one, other).max() for one, other in zip(ours, reference, strict=True)) < 1e-3
    (alone,), _ = both(model, plain, runner)
    assert [s.tokens for s in ours[-1].sequences] == [s.tokens for s in alone.sequences]


def test_a_stop_inside_a_burst_ends_the_sequence_there(tmp_path: Path, runner: Callable[[bool], None]) -> None:
    model = load("llama", tmp_path, cuda(torch.float32))
    free = answers(Sampler(model), [(ask(list(range(9)), 4, 30), None)])[0]
    stop = free.sequences[0].tokens[11]
    stopped = answers(Sampler(model), [(ask(list(range(9)), 4, 30, stop=[stop]), None)])[0]
    for a, b in zip(free.sequences, stopped.sequences, strict=True):
        end = a.tokens.index(stop) + 1 if stop in a.tokens else 30
        assert (b.tokens, b.stop_reason) == (a.tokens[:end], "stop" if stop in a.tokens else "length")


def test_a_policy_that_comes_later_leaves_those_in_flight_as_they_were(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path, cuda(torch.float32))
    old, new = (random_adapter(model, LoraConfig(rank=r, seed=r), r) for r in (16, 48))
    alone = [answers(Sampler(model), [(ask(list(range(9)), 2, 40), adapter)])[0] for adapter in (old, new)]
    sampler, found = Sampler(model), {}
    sampler.add(ask(list(range(9)), 2, 40), old, lambda answer: found.__setitem__(0, answer))
    sampler.step()
    sampler.step()
    sampler.forget(old)
    sampler.add(ask(list(range(9)), 2, 40), new, lambda answer: found.__setitem__(1, answer))
    while sampler.has_work:
        sampler.step()
    for one, n in zip(alone, (0, 1), strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in found[n].sequences]


def test_a_steady_device_gives_the_same_bits_in_any_company(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path, cuda(torch.bfloat16, steady=True))
    asked = mixed(model)
    alone = [answers(Sampler(model), [one])[0] for one in asked]
    together = answers(Sampler(model), asked)
    for one, other in zip(alone, together, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        assert [s.logprobs for s in one.sequences] == [s.logprobs for s in other.sequences]
        assert one.prompt_logprobs == other.prompt_logprobs


def test_prompts_read_by_a_recorded_pass_are_scored_as_by_one_that_is_not(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path, cuda(torch.float32))
    adapter = random_adapter(model, LoraConfig(rank=8, seed=1), 1)
    rng = np.random.default_rng(0)
    rounds = [
        [(ask(random_tokens(rng, n), 2, 5, prompt_logprobs=True), adapter) for n in (9, 33, 70)] for _ in range(6)
    ]
    sampler = Sampler(model)
    for asked in rounds:  # of one size: run as it is, then recorded, then replayed
        for one, other in zip(answers(sampler, asked), answers(Sampler(model), asked), strict=True):
            assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
            assert gaps(one, other).max() < 2e-3


def test_whoever_joins_late_changes_nothing_for_those_who_decode(
    tmp_path: Path, runner: Callable[[bool], None]
) -> None:
    model = load("qwen3", tmp_path, cuda(torch.float32))
    torch.backends.cuda.matmul.allow_tf32 = False
    likeliest = [
        (replace(request, sampling_params=replace(request.sampling_params, temperature=0.0)), adapter)
        for request, adapter in mixed(model)
    ]
    found = []
    for kernels in (False, True):
        runner(kernels)
        sampler, got = Sampler(model, Limits(16, 2000, 2000, 256, 128)), {}
        for n, (request, adapter) in enumerate(likeliest):
            sampler.add(request, adapter, lambda answer, n=n, got=got: got.__setitem__(n, answer))  # type: ignore[misc]
            sampler.step()
            sampler.step()
        while sampler.has_work:
            sampler.step()
        assert sampler.cache.used == 0
        found.append([got[n] for n in range(len(likeliest))])
    for one, other in zip(*found, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
