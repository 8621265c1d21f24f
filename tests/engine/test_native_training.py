"""The native training pass gives the log-probs and gradients of the torch pass, and the same bits every time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import SHARED, group_data, peft_gradients, peft_model, policy_datum, random_adapter, random_tokens
from test_native import ask
from test_trainer import train
from tiny_models import config
from torch import Tensor
from transformers import AutoModelForCausalLM

from mint.engine import token_budget, trainer
from mint.engine.device import Cores
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.native import library, weights
from mint.engine.native import training as native_training
from mint.engine.native.training import NativeTraining
from mint.engine.sampler.sampler import Sampler
from mint.engine.token_budget import TokenBudget
from mint.engine.trainer import Trainer
from mint.types import Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams

pytestmark = pytest.mark.skipif(library.library().functions is None, reason=library.library().reason)
FUSED = ["llama", "qwen2", "qwen3", "gemma3_plain"]
Found = tuple[list[np.ndarray], list[Tensor]]


def found(model: BaseModel, adapter: Adapter, data: Sequence[Datum], **options: Any) -> Found:
    """Log-probs of each datum, and the gradients."""
    adapter.gradients_P = None
    lean = options.pop("lean", False)
    output = train(Trainer(model, lean=lean), adapter, data, **options)
    return [each["logprobs"].to_numpy() for each in output.loss_fn_outputs], adapter.gradients or []


def through_torch(model: BaseModel, adapter: Adapter, data: Sequence[Datum], **options: Any) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "native_training", None)
        return found(model, adapter, data, **options)


def assert_close(ours: Found, theirs: Found) -> None:
    for mine, other in zip(ours[0], theirs[0], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4, rtol=0)
    scale = max(float(gradient.abs().max()) for gradient in theirs[1])
    assert scale > 1e-3
    for gradient, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5 * scale + 2e-4 * float(other.abs().max()))


def assert_same_bits(ours: Found, theirs: Found) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("groups", SHARED.values(), ids=SHARED.keys())
def test_trees_of_every_family_give_the_gradients_of_the_torch_pass(
    family: str, groups: Any, tiny_model: Callable[[str], BaseModel]
) -> None:
    model = tiny_model(family)
    assert isinstance(model.native_training, NativeTraining)
    adapter = random_adapter(model, LoraConfig(rank=5, seed=0))
    data = group_data(3, *groups)
    assert_close(found(model, adapter, data), through_torch(model, adapter, data))


@pytest.mark.parametrize("rank", [1, 7, 64, 70])
@pytest.mark.parametrize("unembed", [True, False])
def test_gradients_of_any_rank(rank: int, unembed: bool, tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("qwen3")
    adapter = random_adapter(model, LoraConfig(rank=rank, seed=0, train_unembed=unembed))
    data = group_data(4, *SHARED["a group"])
    assert_close(found(model, adapter, data), through_torch(model, adapter, data))


LINEARS = {
    "some of a projection's": ("layers.1.self_attn.v_proj", "layers.2.mlp.gate_proj"),
    "the last of the model": ("layers.2.mlp.down_proj",),
    "the first of the model": ("layers.0.self_attn.q_proj",),
    "the unembedding": ("lm_head",),
}


@pytest.mark.parametrize("chosen", LINEARS.values(), ids=LINEARS.keys())
def test_an_adapter_may_be_on_some_linears_only(
    chosen: tuple[str, ...], tiny_model: Callable[[str], BaseModel]
) -> None:
    model = tiny_model("qwen2")
    whole = random_adapter(model, LoraConfig(rank=4, seed=0))
    adapter = Adapter("", whole.config, {path: pair for path, pair in whole.weights.items() if path.endswith(chosen)})
    assert len(adapter.weights) == len(chosen)
    data = group_data(5, *SHARED["groups, singles and a short prompt"])
    assert_close(found(model, adapter, data), through_torch(model, adapter, data))


def wide(folder: Path, family: str, **settings: Any) -> BaseModel:
    """With weights of the usual size, and rows of more than one panel."""
    chosen = config(family)
    sizes = {"initializer_range": 0.02, "hidden_size": 80, "intermediate_size": 200, "max_position_embeddings": 1024}
    for name, value in {**sizes, **settings}.items():
        setattr(chosen, name, value)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(chosen, dtype=torch.float32).save_pretrained(folder)
    return BaseModel.load(str(folder))


@pytest.mark.parametrize("window", [None, 70])
def test_long_sequences_and_windows_of_many_blocks(window: int | None, tmp_path: Path) -> None:
    windows = {"sliding_window": window, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    model = wide(tmp_path, "qwen2", **(windows if window else {}))
    assert model.windows == ([70, 70, None] if window else [None, None, 5])
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0))
    rng = np.random.default_rng(0)
    data = group_data(6, [200], [[1, 90, 130]]) + [policy_datum(rng, length, length // 3) for length in (1, 300, 97)]
    assert_close(found(model, adapter, data), through_torch(model, adapter, data))


@pytest.mark.parametrize("thrice", [True, False])
def test_weights_that_are_held_twice_or_thrice_give_the_same_gradients(
    thrice: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are no whole vectors, and sums over more than one block of outputs."""
    monkeypatch.setattr(weights, "MOST_BYTES_THRICE", 2**30 if thrice else 0)
    model = wide(tmp_path, "llama", hidden_size=72, head_dim=18, intermediate_size=402, vocab_size=800)
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0))
    data = group_data(2, *SHARED["a group"])
    assert_close(found(model, adapter, data), through_torch(model, adapter, data))


def test_single_tokens_soft_targets_and_a_temperature(tiny_model: Callable[[str], BaseModel]) -> None:
    model, rng = tiny_model("llama"), np.random.default_rng(1)
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0))
    data = [
        Datum(
            ModelInput.from_ints(random_tokens(rng, length)),
            {"target_tokens": rng.integers(0, 97, (length, 3)), "weights": rng.normal(size=(length, 3))},
        )
        for length in (1, 1, 4, 1)
    ]
    options: dict[str, Any] = {"loss_fn": "cross_entropy"}
    assert_close(found(model, adapter, data, **options), through_torch(model, adapter, data, **options))
    data = [policy_datum(rng, length, 0) for length in (1, 6)]
    options = {"config": {"temperature": 0.6}}
    assert_close(found(model, adapter, data, **options), through_torch(model, adapter, data, **options))


@pytest.mark.parametrize("unembed", [True, False])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "dro"])
def test_tokens_without_an_advantage_are_left_out_only_where_they_have_no_gradient(
    loss_fn: str, unembed: bool, tmp_path: Path
) -> None:
    """More of them than a block of rows holds, and none marked by a weight; dro pulls them back all the same."""
    model, rng = wide(tmp_path, "qwen3"), np.random.default_rng(8)
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0, train_unembed=unembed))
    data = []
    for length in (130, 40, 90):
        inputs = policy_datum(rng, length, 0).loss_fn_inputs
        advantages = np.where(np.arange(length) % 100 < 30, 0.0, rng.normal(size=length)) * (length != 40)
        given = {key: inputs[key] for key in ("target_tokens", "logprobs")} | {"advantages": advantages}
        data.append(Datum(ModelInput.from_ints(random_tokens(rng, length)), given))
    options: dict[str, Any] = {"loss_fn": loss_fn}
    assert_close(found(model, adapter, data, **options), through_torch(model, adapter, data, **options))


@pytest.mark.parametrize("family", FUSED)
def test_it_is_about_as_close_to_float64_as_torch_is(family: str, tmp_path: Path) -> None:
    model = wide(tmp_path, family)
    adapter = random_adapter(model, LoraConfig(rank=4, seed=0))
    data = [
        Datum(datum.model_input, {key: datum.loss_fn_inputs[key] for key in ("target_tokens", "weights")})
        for datum in group_data(7, [40], [[60, 80]])
    ]
    reference = peft_model(tmp_path, adapter).double()
    for datum in data:
        weights, targets = (datum.loss_fn_inputs[key].to_torch() for key in ("weights", "target_tokens"))
        logits = reference(input_ids=torch.tensor([datum.model_input.to_ints()]), use_cache=False).logits[0]
        p = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        (-(weights * p).sum()).backward()
    exact = peft_gradients(reference, adapter)

    def distance(gradients: Iterable[Tensor]) -> float:
        return max(float((g - e).abs().max() / e.abs().max()) for g, e in zip(gradients, exact, strict=True))

    ours = distance(found(model, adapter, data, loss_fn="cross_entropy")[1])
    theirs = distance(through_torch(model, adapter, data, loss_fn="cross_entropy")[1])
    assert 0 < ours < 4 * theirs


@pytest.mark.parametrize("family", FUSED)
def test_tokens_drawn_in_native_code_have_the_trainers_log_probs_to_the_last_bit(family: str, tmp_path: Path) -> None:
    """Through prompts and answers of several blocks, whichever adapter."""
    model, rng = wide(tmp_path, family), np.random.default_rng(2)
    adapters = [random_adapter(model, LoraConfig(rank=4, seed=1)), None]
    params = SamplingParams(max_tokens=40, seed=3, stop=[])
    asked = [
        (SampleRequest(ModelInput.from_ints(random_tokens(rng, length)), params, 2), adapter)
        for length, adapter in zip((250, 30), adapters, strict=True)
    ]
    for answer, (request, adapter) in zip(ask(Sampler(model), asked), asked, strict=True):
        prompt = request.prompt.to_ints()
        for sequence in answer.sequences:
            tokens = prompt + sequence.tokens
            scored = score(model, adapter, [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})])[0]
            assert np.array_equal(scored[len(prompt) - 1 :], np.array(sequence.logprobs, np.float32))


@pytest.mark.parametrize("unembed", [True, False])
def test_lean_and_forward_only_passes_and_dirty_memory_give_the_same_bits(
    unembed: bool, tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that holds what is no number shows whoever reads before writing."""
    model = tiny_model("qwen3")
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0, train_unembed=unembed))
    data = group_data(8, *SHARED["groups, singles and a short prompt"])
    plain = found(model, adapter, data)
    assert_same_bits(found(model, adapter, data, lean=True), plain)
    assert_same_bits((found(model, adapter, data, backward=False)[0], []), (plain[0], []))

    class Dirty(native_training._Memory):
        def __init__(self, floats: int) -> None:
            super().__init__(floats)
            self.numbers.fill_(torch.nan)

    monkeypatch.setattr(native_training, "_Memory", Dirty)
    monkeypatch.setattr(model, "native_training", NativeTraining(model.packed))  # type: ignore[arg-type]
    for lean in (False, True):
        assert_same_bits(found(model, adapter, data, lean=lean), plain)


def test_passes_side_by_side_give_the_bits_of_passes_alone(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("llama")

    def run(rank: int) -> Found:
        return found(model, random_adapter(model, LoraConfig(rank=rank, seed=1)), group_data(rank, *SHARED["a group"]))

    ranks = [1, 4, 9, 16]
    alone = [run(rank) for rank in ranks]
    with ThreadPoolExecutor(4) as threads:
        for n, each in enumerate(threads.map(run, ranks * 3)):
            assert_same_bits(each, alone[n % 4])


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("unembed", [False, True])
@pytest.mark.parametrize("family", FUSED)
def test_threads_that_share_a_pass_give_the_bits_of_one(
    family: str, unembed: bool, lean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree with a long prompt, prompts without a gradient, short and long answers; of any number of threads."""
    model, rng = wide(tmp_path, family), np.random.default_rng(11)
    adapter = random_adapter(model, LoraConfig(rank=5, seed=0, train_unembed=unembed))
    data = group_data(12, [500], [[3, 20, 90]]) + [policy_datum(rng, length, 0) for length in (5, 520, 60)]

    share(monkeypatch, 1)
    one = found(model, adapter, data, lean=lean)
    assert_close(one, through_torch(model, adapter, data, lean=lean))
    for count in (2, 3, 7) * 3:
        share(monkeypatch, count)
        assert_same_bits(found(model, adapter, data, lean=lean), one)


def share(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """From here on a call is one micro-batch, and so many threads compute it."""
    monkeypatch.setattr(token_budget, "cores", lambda: Cores(2))
    monkeypatch.setattr(trainer, "cores", lambda: Cores(threads))
    monkeypatch.setattr(TokenBudget, "choices", lambda self, tokens: {1})


def score(model: BaseModel, adapter: Adapter | None, data: Sequence[Datum]) -> list[np.ndarray]:
    steps = Trainer(model).forward_backward(adapter, data, "cross_entropy", {}, backward=False)
    with pytest.raises(StopIteration) as done:
        while True:
            next(steps)
    return [each["logprobs"].to_numpy() for each in done.value.value.loss_fn_outputs]


def test_the_base_model_alone_is_scored(tiny_model: Callable[[str], BaseModel]) -> None:
    model = tiny_model("qwen3")
    data = [
        Datum(each.model_input, {"target_tokens": each.loss_fn_inputs["target_tokens"]})
        for each in group_data(9, *SHARED["a group"])
    ]
    nothing = model.new_adapter(LoraConfig(rank=2, seed=0))  # its B is zero
    for mine, other in zip(
        score(model, None, data), through_torch(model, nothing, data, loss_fn="cross_entropy")[0], strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=1e-4, rtol=0)


def test_memory_is_kept_for_the_next_pass(
    tiny_model: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    adapter = random_adapter(model, LoraConfig(rank=2, seed=0))
    made: list[int] = []

    class Counted(native_training._Memory):
        def __init__(self, floats: int) -> None:
            made.append(floats)
            super().__init__(floats)

    monkeypatch.setattr(native_training, "_Memory", Counted)
    monkeypatch.setattr(model, "native_training", NativeTraining(model.packed))  # type: ignore[arg-type]
    for length in (20, 20, 9, 30, 20):
        found(model, adapter, [policy_datum(np.random.default_rng(0), length, 2)])
    assert len(made) == 2 and made[0] < made[1]
