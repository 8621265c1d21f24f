"""Products in bfloat16 on a CPU: transformers and PEFT with every product's inputs rounded give the same, sampler and
trainer agree to the last bit, and what cannot be computed so is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import SHARED, group_data, logprobs, peft_gradients, peft_model, random_adapter
from test_native import ask, requests
from test_native_training import FUSED, assert_same_bits, found, score, share
from tiny_models import config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mint.engine.device import Device
from mint.engine.model import BaseModel
from mint.engine.native import library, weights
from mint.engine.native.decoder import NativeDecoder
from mint.engine.process import make_engine
from mint.engine.sampler.sampler import Sampler
from mint.errors import BadRequest
from mint.types import Datum, LoraConfig, ModelInput

needs_compiler = pytest.mark.skipif(library.library().functions is None, reason=library.library().reason)
ROUNDED = Device(torch.device("cpu"), torch.float32, "asked for", bfloat16_products=True)


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x.bfloat16().float(), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.bfloat16().float() @ ctx.saved_tensors[0], None, None


def rounding(model: nn.Module) -> nn.Module:
    """The same model with weights in bfloat16, and linears that round what they multiply; adapters stay as they are."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lora_" not in name:
            module.forward = lambda x, m=module: _RoundedLinear.apply(x, m.weight, m.bias)  # type: ignore[method-assign]
    with torch.no_grad():
        scales = [each for name, each in model.named_buffers() if name.endswith("embed_scale")]
        for each in [*scales, *(weight for name, weight in model.named_parameters() if "lora_" not in name)]:
            each.copy_(each.bfloat16())
    return model


def save_odd(family: str, folder: Path) -> Path:
    """Weights of the usual size that bfloat16 does round; sums in several pieces, over odd numbers of inputs and of
    outputs."""
    chosen = config(family)
    sizes = {"initializer_range": 0.02, "hidden_size": 80, "intermediate_size": 403, "max_position_embeddings": 512}
    for name, value in sizes.items():
        setattr(chosen, name, value)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(chosen, dtype=torch.float32).save_pretrained(folder)
    return folder


def scored_data() -> list[Datum]:
    groups = SHARED["groups, singles and a short prompt"]
    keys = ("target_tokens", "weights")
    return [Datum(d.model_input, {key: d.loss_fn_inputs[key] for key in keys}) for d in group_data(3, *groups)]


@needs_compiler
@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("unembed", [True, False])
def test_it_computes_what_transformers_computes_with_rounded_inputs(family: str, unembed: bool, tmp_path: Path) -> None:
    """Much more closely than float32 does: only where a sum lies on the edge between two roundings its order decides.
    Where the unembedding is not trained, its gradient is rounded elsewhere (see `training_head.h`), which shows in all
    gradients."""
    folder, data = save_odd(family, tmp_path), scored_data()
    rounded, plain = BaseModel.load(str(folder), ROUNDED), BaseModel.load(str(folder))
    adapter = random_adapter(rounded, LoraConfig(rank=5, seed=0, train_unembed=unembed))
    ours, unrounded = (found(model, adapter, data, loss_fn="cross_entropy") for model in (rounded, plain))
    reference, theirs = rounding(peft_model(folder, adapter)), []
    for datum in data:
        theirs.append(logprobs(reference, datum))
        (-(theirs[-1] * datum.loss_fn_inputs["weights"].to_torch()).sum()).backward()
    expected = np.concatenate([each.detach().numpy() for each in theirs])

    def gap(of: list[np.ndarray]) -> float:
        return float(np.abs(np.concatenate(of) - expected).mean())

    def distance(gradients: list[Tensor]) -> float:
        pairs = zip(gradients, peft_gradients(reference, adapter), strict=True)
        return float(np.median([float((mine - other).norm() / other.norm()) for mine, other in pairs]))

    assert gap(ours[0]) < gap(unrounded[0]) / 3
    assert distance(ours[1]) < distance(unrounded[1]) / (2 if unembed else 1.2)
    assert gap(ours[0]) < 3e-4 and distance(ours[1]) < 0.005


@needs_compiler
@pytest.mark.parametrize("family", FUSED)
def test_sampler_and_trainer_agree_to_the_last_bit_in_mixed_company(family: str, tmp_path: Path) -> None:
    model = BaseModel.load(str(save_odd(family, tmp_path)), ROUNDED)
    adapters = [random_adapter(model, LoraConfig(rank=5, seed=1), 1), None]
    asked = requests(np.random.default_rng(5), adapters)
    together, alone = ask(Sampler(model), asked), [ask(Sampler(model), [one])[0] for one in asked]
    assert [a.sequences for a in together] == [a.sequences for a in alone]
    for answer, (request, adapter) in zip(together, asked, strict=True):
        prompt = request.prompt.to_ints()
        for sequence in answer.sequences:
            tokens = prompt + sequence.tokens
            scored = score(model, adapter, [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})])[0]
            if request.sampling_params.top_k == -1 and request.sampling_params.top_p == 1.0:
                assert np.array_equal(scored[len(prompt) - 1 :], np.array(sequence.logprobs, np.float32))
            np.testing.assert_allclose(scored[len(prompt) - 1 :], sequence.logprobs, atol=1e-5, rtol=0)  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.parametrize("unembed", [True, False])
def test_lean_forward_only_and_shared_passes_give_the_same_bits(
    unembed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = BaseModel.load(str(save_odd("qwen3", tmp_path)), ROUNDED)
    adapter = random_adapter(model, LoraConfig(rank=3, seed=0, train_unembed=unembed))
    data = group_data(8, *SHARED["groups, singles and a short prompt"])
    share(monkeypatch, 1)
    plain = found(model, adapter, data)
    assert_same_bits(found(model, adapter, data, lean=True), plain)
    assert_same_bits((found(model, adapter, data, backward=False)[0], []), (plain[0], []))
    for threads in (2, 3, 2, 3):
        share(monkeypatch, threads)
        assert_same_bits(found(model, adapter, data), plain)


@needs_compiler
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1])
def test_what_is_not_a_number_stays_so_and_its_row_s(bits: int, tmp_path: Path) -> None:
    """Whichever it is: rounding by adding to its bits would make a number of some."""
    model = BaseModel.load(str(save_odd("llama", tmp_path)), ROUNDED)
    assert model.packed is not None
    hidden = torch.randn(3, 80)
    whole = NativeDecoder(model.packed, 16).logits(hidden, [(None, 3)], 1)
    hidden[1].view(torch.int32)[:] = bits
    found = NativeDecoder(model.packed, 16).logits(hidden, [(None, 3)], 1)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], whole[[0, 2]]) and whole.isfinite().all()


@needs_compiler
def test_weights_in_pairs_take_half_of_the_memory(tmp_path: Path) -> None:
    folder = save_odd("llama", tmp_path)
    rounded, plain = BaseModel.load(str(folder), ROUNDED).packed, BaseModel.load(str(folder)).packed
    assert rounded is not None and plain is not None
    held = [sum(tensor.nbytes for tensor in packed._held) for packed in (rounded, plain)]
    assert held[0] < 0.55 * held[1]


@needs_compiler
def test_a_flag_of_the_server_asks_for_it(tiny_folder: Callable[[str], Path]) -> None:
    for asked in (False, True):
        engine = make_engine([str(tiny_folder("llama"))], bfloat16=asked)
        model = engine._runtimes.loaded[str(tiny_folder("llama"))].model  # type: ignore[attr-defined]
        engine.close()
        on_a_gpu = torch.cuda.is_available()
        assert model.bfloat16_products == (asked and not on_a_gpu)
        assert model.facts.dtype == ("bfloat16" if asked or on_a_gpu else "float32")


def test_what_cannot_be_computed_so_is_refused(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadRequest, match=r"Gemma3.*cannot be computed in bfloat16 on this CPU.*without --bfloat16"):
        BaseModel.load(str(tiny_folder("gemma3")), ROUNDED)
    monkeypatch.setattr(weights, "library", lambda: library.Library(None, "no compiler"))
    with pytest.raises(BadRequest, match=r"takes a C\+\+ compiler"):
        BaseModel.load(str(tiny_folder("llama")), ROUNDED)


@needs_compiler
@pytest.mark.parametrize("able", [True, False])
def test_a_processor_that_gains_nothing_by_it_is_told(
    able: bool, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    functions = library.library().functions
    monkeypatch.setattr(functions, "mint_multiplies_pairs", lambda: int(able), raising=False)
    monkeypatch.setattr("mint.engine.native.structures.declare", lambda functions: functions)
    BaseModel.load(str(tiny_folder("llama")), ROUNDED)
    assert ("float32 is faster here" in caplog.text) != able
