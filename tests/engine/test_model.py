from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import logits, plain_model, random_tokens
from tiny_models import VOCAB, config
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from mint.engine import device, hub
from mint.engine.attention import PackedAttention
from mint.engine.lora import Rows
from mint.engine.model import BaseModel
from mint.errors import BadRequest, NotFound


def packed_logits(model: BaseModel, sequences: list[list[int]]) -> list[torch.Tensor]:
    lengths = [len(tokens) for tokens in sequences]
    rows: Rows = [(None, sum(lengths))]
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        hidden = model.hidden(tokens_T, positions_T, PackedAttention(lengths), rows)
        return list(model.logits(hidden, rows).split(lengths))


@pytest.mark.parametrize("lengths", [[9], [8, 8, 8], [7, 20, 1, 19, 3, 12]], ids=["one", "equal", "ragged"])
def test_packed_sequences_give_the_logits_of_transformers_one_by_one(
    model: BaseModel, tiny_folder: Callable[[str], Path], family: str, lengths: list[int]
) -> None:
    rng = np.random.default_rng(0)
    sequences = [random_tokens(rng, length) for length in lengths]
    reference = plain_model(tiny_folder(family))
    for tokens, ours in zip(sequences, packed_logits(model, sequences), strict=True):
        theirs = logits(reference, tokens)
        assert theirs.abs().max() > 1
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_the_windows_of_the_layers_are_those_of_the_configuration(tiny_model: Callable[[str], BaseModel]) -> None:
    assert tiny_model("gemma3").windows == [6, 6, None]
    assert tiny_model("qwen2").windows == [None, None, 5]
    assert tiny_model("llama").windows == [None, None, None]


@pytest.mark.parametrize("products", [False, True], ids=["in half precision", "with products in bfloat16"])
def test_rotary_frequencies_stay_as_exact_as_transformers_has_them(
    products: bool, tiny_folder: Callable[[str], Path], family: str
) -> None:
    """Rounded like the weights they would turn a token at position 1,000 by several radians more or less."""
    if products and family == "gemma3":
        pytest.skip("its softcap keeps it from products in bfloat16")
    dtype = torch.float32 if products else torch.float16
    asked = device.Device(torch.device("cpu"), dtype, "asked for", bfloat16_products=products)
    theirs = dict(plain_model(tiny_folder(family)).named_buffers())
    found = dict(BaseModel.load(str(tiny_folder(family)), asked)._module.named_buffers())
    names = [name for name in theirs if "inv_freq" in name]
    assert names and all(torch.equal(found[name], theirs[name]) for name in names)


def test_facts_say_what_was_loaded(tiny_model: Callable[[str], BaseModel], tiny_folder: Callable[[str], Path]) -> None:
    model, folder = tiny_model("qwen3"), tiny_folder("qwen3")
    assert model.facts.name == model.facts.folder == str(folder)
    assert model.facts.architecture == "Qwen3ForCausalLM"
    assert (model.facts.vocab_size, model.facts.max_context) == (VOCAB, 64)
    assert model.facts.parameters == plain_model(folder).num_parameters()
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (3, 4, 2, 16)
    assert model.eos_ids == {2}


def test_base_weights_never_ask_for_gradients(model: BaseModel) -> None:
    assert not any(linear.weight.requires_grad for linear in model.linears.values())


def test_every_linear_has_its_group(model: BaseModel) -> None:
    groups = {path.rpartition(".")[2]: linear.group for path, linear in model.linears.items()}
    assert groups == {name: "attn" for name in ("q_proj", "k_proj", "v_proj", "o_proj")} | {
        name: "mlp" for name in ("gate_proj", "up_proj", "down_proj")
    } | {"lm_head": "unembed"}


def test_a_family_that_scales_its_logits_is_refused_by_name(tmp_path: Path) -> None:
    common = {key: getattr(config("llama"), key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    granite = GraniteConfig(**common, num_hidden_layers=1, num_attention_heads=4, logits_scaling=4.0)
    AutoModelForCausalLM.from_config(granite).save_pretrained(tmp_path)
    with pytest.raises(BadRequest, match="GraniteForCausalLM computes its logits in a way"):
        BaseModel.load(str(tmp_path))


def test_an_attention_that_caps_its_scores_is_refused_by_name(tmp_path: Path) -> None:
    common = {key: getattr(config("llama"), key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    gemma2 = Gemma2Config(**common, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    AutoModelForCausalLM.from_config(gemma2).save_pretrained(tmp_path)
    with pytest.raises(BadRequest, match="Gemma2Attention uses softcap"):
        BaseModel.load(str(tmp_path))


def test_a_missing_model_is_not_found_and_the_message_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound, match=r"'nobody/nothing'.*hf download nobody/nothing.*`mint/tiny` is bundled"):
        hub.find_folder("nobody/nothing")
    with pytest.raises(NotFound, match="no such folder"):
        hub.find_folder("/no/such/folder")
    with pytest.raises(NotFound, match=r"lacks config\.json"):
        hub.find_folder(str(tmp_path))


def test_a_hub_that_never_answers_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
        monkeypatch.setattr(hub, "HUB_TIMEOUT", 0.2)
        with pytest.raises(NotFound, match="could not be downloaded"):
            hub.find_folder("nobody/nothing")


def test_a_cached_model_is_found_without_the_network(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]
) -> None:
    import huggingface_hub

    def cached(*args: object, local_files_only: bool = False, **kwargs: object) -> str:
        assert local_files_only, "the network was asked although the cache has the model"
        return str(tiny_folder("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    assert hub.find_folder("some/model") == tiny_folder("llama")


def test_a_model_without_tokenizer_says_so(tiny_model: Callable[[str], BaseModel]) -> None:
    with pytest.raises(NotFound, match="holds no tokenizer"):
        _ = tiny_model("llama").tokenizer


def test_threads_follow_the_width_of_the_model_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(device, "_TORCH_DEFAULT_THREADS", 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3), raising=False)
    assert device.choose_threads(128).count == 1
    assert device.choose_threads(1024).count == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    threads = device.choose_threads(128)
    assert (threads.count, threads.reason) == (torch.get_num_threads(), "OMP_NUM_THREADS=7")


def test_the_bundled_model_loads_with_its_tokenizer_and_end_of_sequence() -> None:
    model = BaseModel.load("mint/tiny")
    tokens = model.tokenizer.encode("3 + 4 = 7")
    assert model.tokenizer.decode(tokens) == "3 + 4 = 7"
    assert model.tokenizer.eos_token_id in model.eos_ids
    assert max(tokens) < model.facts.vocab_size
