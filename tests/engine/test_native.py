"""The native pass computes what torch computes, each row by itself to the last bit, and torch stands in without it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import random_adapter, random_tokens
from tiny_models import config
from transformers import AutoModelForCausalLM

from mint.engine.attention import PackedAttention
from mint.engine.device import Device
from mint.engine.lora import Adapter, Rows
from mint.engine.model import BaseModel
from mint.engine.native import library, weights
from mint.engine.native.decoder import NativeDecoder, TokenRows
from mint.engine.sampler import runners
from mint.engine.sampler.native_reader import NativeReader, NativeStore
from mint.engine.sampler.runner import Reader, Runner
from mint.engine.sampler.sampler import Sampler
from mint.engine.sampler.torch_reader import TorchReader
from mint.engine.trainer import Trainer
from mint.types import Datum, LoraConfig, ModelInput, SampleRequest, SampleResponse, SamplingParams, TensorData

needs_compiler = pytest.mark.skipif(library.library().functions is None, reason=library.library().reason)
FUSED = ["llama", "qwen2", "qwen3", "gemma3_plain"]
BLOCK = 4


def native(model: BaseModel) -> NativeDecoder:
    assert model.packed is not None
    return NativeDecoder(model.packed, BLOCK)


def with_cache(model: BaseModel, blocks: int = 64) -> NativeDecoder:
    decoder = native(model)
    store = NativeStore(model, BLOCK, decoder)
    store.grow(blocks)
    decoder.store = store  # type: ignore[attr-defined]  # it lives as long as the decoder
    return decoder


def packed(lengths: list[int], rng: np.random.Generator) -> TokenRows:
    """Whole sequences next to each other, their blocks numbered anyhow."""
    width = -(-max(lengths) // BLOCK)
    tables = rng.permutation(np.arange(1, 1 + len(lengths) * width)).reshape(len(lengths), width)
    return TokenRows(
        token_T=np.array(random_tokens(rng, sum(lengths))),
        position_T=np.concatenate([np.arange(length) for length in lengths]),
        line_T=np.repeat(np.arange(len(lengths)), lengths),
        table_LM=np.ascontiguousarray(tables),
    )


def adapters_of(model: BaseModel) -> list[Adapter | None]:
    partial = LoraConfig(rank=3, seed=3, train_mlp=False, train_unembed=False)
    return [random_adapter(model, LoraConfig(rank=5, seed=1), 1), None, random_adapter(model, partial, 3)]


# ------------------------------------------------------------------------------------------------ the pass


@needs_compiler
@pytest.mark.parametrize("family", FUSED)
def test_the_pass_equals_the_fused_layers_with_several_adapters(
    family: str, tiny_model: Callable[[str], BaseModel]
) -> None:
    model, lengths = tiny_model(family), [9, 1, 14, 7]
    assert model.fused is not None
    tokens = packed(lengths, np.random.default_rng(0))
    rows: Rows = list(zip([*adapters_of(model), None], lengths, strict=True))
    decoder = with_cache(model)
    with torch.no_grad():
        token_T, position_T = torch.from_numpy(tokens.token_T), torch.from_numpy(tokens.position_T)
        theirs = model.fused.hidden(token_T, position_T, PackedAttention(lengths), rows)
        ours = decoder.hidden(tokens, rows, 1)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(decoder.logits(theirs, rows, 1), model.fused.logits(theirs, rows), rtol=0, atol=1e-4)


@needs_compiler
def test_rows_are_the_same_to_the_last_bit_in_any_company_and_with_any_threads(
    tiny_model: Callable[[str], BaseModel],
) -> None:
    """Long enough for several pieces of every kind of work."""
    model, rng = tiny_model("long"), np.random.default_rng(1)
    lengths = [100, 7, 90, 33, 41, 64, 2]
    adapters = [*adapters_of(model), None, *adapters_of(model)]
    tokens = packed(lengths, rng)
    rows: Rows = list(zip(adapters, lengths, strict=True))
    decoder = with_cache(model, 256)
    whole = decoder.hidden(tokens, rows, 1)
    logits = decoder.logits(whole, rows, 1)
    for threads in (2, 3, 2):
        assert torch.equal(decoder.hidden(tokens, rows, threads), whole)
        assert torch.equal(decoder.logits(whole, rows, threads), logits)
    start = 0
    for line, (length, adapter) in enumerate(zip(lengths, adapters, strict=True)):
        for first in (0, length // 2):  # the second half finds the first in the cache
            part = slice(start + first, start + length)
            alone = TokenRows(
                tokens.token_T[part],
                tokens.position_T[part],
                np.zeros(length - first, int),
                tokens.table_LM[line : line + 1],
            )
            assert torch.equal(decoder.hidden(alone, [(adapter, length - first)], 1), whole[part])
        mine = slice(start, start + length)
        assert torch.equal(decoder.logits(whole[mine], [(adapter, length)], 1), logits[mine])
        start += length


@needs_compiler
@pytest.mark.parametrize("family", [*FUSED, "long"])
def test_rows_of_a_prompt_that_look_together_see_what_each_sees_alone(
    family: str, tiny_model: Callable[[str], BaseModel]
) -> None:
    model, length = tiny_model(family), 43
    tokens = packed([length, 3], np.random.default_rng(2))
    decoder = with_cache(model)
    together = decoder.hidden(tokens, [(None, length + 3)], 1)
    for row in range(length):  # those before it are in the cache
        part = slice(row, row + 1)
        alone = TokenRows(tokens.token_T[part], tokens.position_T[part], np.zeros(1, int), tokens.table_LM[:1])
        assert torch.equal(decoder.hidden(alone, [(None, 1)], 1), together[part])


@needs_compiler
@pytest.mark.parametrize("count", [1, 30, 130])
def test_decoding_in_one_call_gives_the_bits_of_hidden_states_logits_and_draw(
    count: int, tiny_model: Callable[[str], BaseModel]
) -> None:
    """Also where there are more rows than have logits at once, and a run of one adapter is cut there."""
    model, rng = tiny_model("qwen3"), np.random.default_rng(6)
    decoder = with_cache(model, count + 1)
    rows: Rows = [(None, 1)] if count == 1 else list(zip(adapters_of(model), (7, count - 20, 13), strict=True))
    tokens = TokenRows(
        rng.integers(0, 97, count), rng.integers(0, BLOCK, count), np.arange(count), 1 + np.arange(count)[:, None]
    )
    temperature, uniform = rng.choice([0.0, 0.7, 1.0], count), rng.random(count)
    taken_apart = decoder.draw(decoder.logits(decoder.hidden(tokens, rows, 1), rows, 1), temperature, uniform, 1)
    for threads in (1, 2, 3):
        found = decoder.decode(tokens, rows, temperature, uniform, threads)
        assert all(map(np.array_equal, found, taken_apart))


@needs_compiler
def test_what_another_policy_left_in_a_block_never_enters_a_sum(tiny_model: Callable[[str], BaseModel]) -> None:
    model, rng = tiny_model("qwen2"), np.random.default_rng(2)
    tokens, rows = packed([7, 9], rng), [(None, 16)]
    decoder = native(model)
    found = []
    for left in (0.0, torch.nan, torch.inf):
        store = NativeStore(model, BLOCK, decoder)
        store.grow(16)
        for tensor in (*store.keys, *store.values):
            tensor.fill_(left)
        found.append(decoder.hidden(tokens, rows, 1))
    assert found[0].isfinite().all() and torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# ------------------------------------------------------------------------------------------------ the draw


@needs_compiler
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5, 1e-30])
def test_draws_invert_the_distribution(temperature: float, tiny_model: Callable[[str], BaseModel]) -> None:
    rng = np.random.default_rng(3)
    rows, vocabulary = 200, 1003
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocabulary)).astype(np.float32))
    uniform = rng.random(rows)
    uniform[:2] = 0.0, np.nextafter(1.0, 0.0)
    tokens, logprobs = native(tiny_model("llama")).draw(logits, np.full(rows, temperature), uniform, 2)
    exact = logits.double()
    shifted = (exact - exact.amax(-1, keepdim=True)) / temperature
    cumulative = shifted.softmax(-1).cumsum(-1).numpy()
    below = np.where(tokens > 0, np.take_along_axis(cumulative, np.maximum(tokens - 1, 0)[:, None], 1)[:, 0], 0.0)
    above = np.take_along_axis(cumulative, tokens[:, None], 1)[:, 0]
    assert (below <= uniform + 1e-6).all() and (uniform <= above + 1e-6).all() and (above > below).all()
    expected = exact.log_softmax(-1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0]
    np.testing.assert_allclose(logprobs, expected, atol=2e-6)


@needs_compiler
def test_greedy_draws_take_the_first_of_the_likeliest_and_bad_logits_are_told(
    tiny_model: Callable[[str], BaseModel],
) -> None:
    logits = torch.zeros(4, 40)
    logits[0, 17], logits[1, [5, 39]], logits[2, 3], logits[3, 38] = 2.0, 1.0, torch.nan, torch.inf
    tokens, logprobs = native(tiny_model("llama")).draw(logits, np.zeros(4), np.zeros(4), 1)
    assert tokens[:2].tolist() == [17, 5]
    np.testing.assert_allclose(logprobs[0], torch.log_softmax(logits[0], -1)[17], atol=1e-6)
    assert np.isnan(logprobs[2:]).all()


# ------------------------------------------------------------------------------------------------ the sampler


def ask(sampler: Sampler, asked: list[tuple[SampleRequest, Adapter | None]]) -> list[SampleResponse]:
    found: dict[int, Any] = {}
    for n, (request, adapter) in enumerate(asked):
        sampler.add(request, adapter, lambda answer, n=n: found.__setitem__(n, answer))  # type: ignore[misc]
    while sampler.has_work:
        sampler.step()
    return [found[n] for n in range(len(asked))]


def requests(rng: np.random.Generator, adapters: list[Adapter | None]) -> list[tuple[SampleRequest, Adapter | None]]:
    """Plain ones, and ones that need torch for their draw, of several adapters."""
    params: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5, "temperature": 0.7}, {}, {}]
    return [
        (
            SampleRequest(
                ModelInput.from_ints(random_tokens(rng, 5 + 7 * n)),
                SamplingParams(max_tokens=12, seed=n, stop=[], **options),
                2,
                prompt_logprobs=n % 2 == 0,
            ),
            adapters[n % len(adapters)],
        )
        for n, options in enumerate(params)
    ]


def sampler_with(model: BaseModel, reader: Callable[[BaseModel, int], Reader]) -> Sampler:
    sampler = Sampler(model)
    sampler.runner = Runner(model, reader(model, sampler.cache.block_size))
    return sampler


@needs_compiler
@pytest.mark.parametrize("family", FUSED)
def test_samples_are_those_of_torch(family: str, tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model(family)
    asked = requests(np.random.default_rng(4), adapters_of(model))
    sampler = Sampler(model)
    assert isinstance(sampler.runner, Runner) and isinstance(sampler.runner._reader, NativeReader)
    for ours, theirs in zip(ask(sampler, asked), ask(sampler_with(model, TorchReader), asked), strict=True):
        assert [s.tokens for s in ours.sequences] == [s.tokens for s in theirs.sequences]
        for one, other in zip(ours.sequences, theirs.sequences, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)  # type: ignore[arg-type]


def ordinary(family: str, folder: Path) -> BaseModel:
    """With weights of the usual size, and wide enough for long sums."""
    sizes = {"initializer_range": 0.02, "hidden_size": 256, "intermediate_size": 768}
    settings = config(family)
    for name, value in sizes.items():
        setattr(settings, name, value)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder)
    return BaseModel.load(str(folder))


@pytest.mark.parametrize("family", FUSED)
def test_sampler_and_trainer_agree_to_1e_5_in_mixed_company(family: str, tmp_path: Path) -> None:
    model = ordinary(family, tmp_path)
    asked = requests(np.random.default_rng(5), adapters_of(model))
    for answer, (request, adapter) in zip(ask(Sampler(model), asked), asked, strict=True):
        prompt = request.prompt.to_ints()
        for sequence in answer.sequences:
            full = prompt + sequence.tokens
            datum = Datum(ModelInput.from_ints(full[:-1]), {"target_tokens": TensorData(full[1:], "int64")})
            steps = Trainer(model).forward_backward(adapter, [datum], "cross_entropy", {}, backward=False)
            try:
                while True:
                    next(steps)
            except StopIteration as stop:
                scored = stop.value.loss_fn_outputs[0]["logprobs"].to_numpy()
            np.testing.assert_allclose(sequence.logprobs, scored[len(prompt) - 1 :], atol=1e-5, rtol=0)  # type: ignore[arg-type]
            if answer.prompt_logprobs is not None:
                np.testing.assert_allclose(
                    answer.prompt_logprobs[1:],
                    scored[: len(prompt) - 1],
                    atol=1e-5,
                    rtol=0,  # type: ignore[arg-type]
                )


@needs_compiler
def test_an_adapter_that_is_forgotten_leaves_nothing_behind(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("llama")
    adapter = adapters_of(model)[0]
    assert adapter is not None
    sampler = Sampler(model)
    ask(sampler, [(SampleRequest(ModelInput.from_ints([1, 2]), SamplingParams(max_tokens=2)), adapter)])
    assert isinstance(sampler.runner, Runner) and isinstance(sampler.runner._reader, NativeReader)
    held = sampler.runner._reader._decoder._adapters
    assert adapter in held
    sampler.forget(adapter)
    assert adapter not in held


# ------------------------------------------------------------------------------------------------ who gets it


def goes_through_torch(model: BaseModel) -> bool:
    return isinstance(runners.reader_for(model, 16), TorchReader) and model.native_training is None


def test_other_families_number_formats_and_machines_go_through_torch(
    tiny_model: Callable[[str], BaseModel], tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not bfloat16: some virtual machines announce instructions for it that they then refuse.
    doubles = BaseModel.load(str(tiny_folder("llama")), Device(torch.device("cpu"), torch.float64, "asked for"))
    assert goes_through_torch(tiny_model("gemma3")) and goes_through_torch(doubles)
    monkeypatch.setattr(weights, "library", lambda: library.Library(None, "no compiler"))
    assert goes_through_torch(BaseModel.load(str(tiny_folder("llama"))))


def test_a_model_too_large_to_be_held_twice_goes_through_torch(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MOST_BYTES", 1000)
    assert goes_through_torch(BaseModel.load(str(tiny_folder("llama"))))


@pytest.mark.parametrize("failure", ["no compiler", "no folder", "no home", "bad source"])
def test_without_a_library_it_says_why(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if failure == "no compiler":
        monkeypatch.setattr(library, "COMPILERS", ("mint-no-such-compiler",))
    elif failure == "no folder":
        (tmp_path / "cache").write_text("a file where the folder should be")
    elif failure == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    else:
        (tmp_path / "decoder.cpp").write_text("this is not C++")
        monkeypatch.setattr(library, "SOURCES", tmp_path)
    found = library._find()
    assert found.functions is None and "could not be made" in found.reason
    assert "sampling and training go through torch" in caplog.text


@needs_compiler
def test_processes_that_compile_at_once_all_get_a_whole_library(tmp_path: Path) -> None:
    exported = '__attribute__((visibility("default")))'
    (tmp_path / "decoder.cpp").write_text(f'extern "C" {exported} int answer() {{ return 42; }}')
    path = tmp_path / "cache" / "library.so"
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
        patch.setattr(library, "SOURCES", tmp_path)
        list(threads.map(library.compile_to, [path] * 4))
    symbols = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
    assert "answer" in symbols and list(path.parent.iterdir()) == [path]
