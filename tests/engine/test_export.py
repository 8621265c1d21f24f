"""Exported folders against transformers and PEFT, which the test loads by itself; planted mistakes are caught."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from reference import logits, peft_model, plain_model, random_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mint.engine import checkpoint, export_proof, reload
from mint.engine import export as export_module
from mint.engine.export import FORMATS, export
from mint.engine.export_proof import Different
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.errors import BadRequest, Internal
from mint.types import LoraConfig

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]
EVERYTHING = LoraConfig(rank=4)


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting Python takes seconds; tests/cli/test_export.py does it."""
    monkeypatch.setattr(export_proof, "_ask_new_process", reload.answer)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[Path, Adapter]]:
    def save(base: Path, lora: LoraConfig = EVERYTHING) -> tuple[Path, Adapter]:
        adapter = random_adapter(BaseModel.load(str(base)), lora)
        checkpoint.save(tmp_path / "checkpoint", adapter)
        return tmp_path / "checkpoint", adapter

    return save


def cast(base: Path, dtype: torch.dtype, folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(folder)
    return folder


def loaded(folder: Path, base: Path, form: str) -> Any:
    return PeftModel.from_pretrained(plain_model(base), folder) if form == "peft" else plain_model(folder)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_computes_what_peft_does_with_the_same_matrices(
    family: str, form: str, tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path
) -> None:
    base = tiny_folder(family)
    source, adapter = saved(base)
    found = export(source, form, tmp_path / "out")
    assert found.largest < 1e-4 and found.tokens > 100 and found.dtype == "float32"
    expected = logits(peft_model(base, adapter), TOKENS)
    assert torch.allclose(logits(loaded(tmp_path / "out", base, form), TOKENS), expected, atol=2e-4)
    assert not torch.allclose(logits(plain_model(base), TOKENS), expected, atol=0.1), "the adapter does something"
    assert json.loads((tmp_path / "out" / "mint_export.json").read_text())["difference"]["largest"] == found.largest


def test_a_tied_unembedding_that_was_trained_gets_weights_of_its_own(
    tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path
) -> None:
    base = tiny_folder("qwen3")
    export(saved(base)[0], "merged", tmp_path / "out")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in before
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert not torch.allclose(after["lm_head.weight"], before["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_tied_unembedding_that_was_not_trained_stays_tied(
    tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path
) -> None:
    export(saved(tiny_folder("qwen3"), LoraConfig(rank=4, train_unembed=False))[0], "merged", tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def peft_folder(base: Path, folder: Path, **settings: Any) -> Any:
    """A folder PEFT itself wrote, with weights that do something; the model that wrote it."""
    model = get_peft_model(plain_model(base), PeftLoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


@pytest.mark.parametrize("form", ["peft", "merged"])
@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_that_differ_between_linears_survive(
    form: str, rslora: bool, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_folder("llama")
    theirs = peft_folder(
        base,
        tmp_path / "theirs",
        r=4,
        lora_alpha=8,
        use_rslora=rslora,
        target_modules=["q_proj", "down_proj", "lm_head"],
        rank_pattern={"q_proj": 6, r"layers\.1\.mlp\.down_proj": 2},
        alpha_pattern={"down_proj": 3},
    )
    export(tmp_path / "theirs", form, tmp_path / "out")
    found = logits(loaded(tmp_path / "out", base, form), TOKENS)
    assert torch.allclose(found, logits(theirs, TOKENS), atol=2e-4)


def test_linears_adapted_in_some_layers_only_are_named_in_full(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_folder("llama")
    targets = ["model.layers.0.self_attn.q_proj", "model.layers.2.self_attn.q_proj", "v_proj"]
    theirs = peft_folder(base, tmp_path / "theirs", r=4, lora_alpha=8, target_modules=targets)
    export(tmp_path / "theirs", "peft", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"] == sorted(targets)
    ours = loaded(tmp_path / "out", base, "peft")
    assert {n for n, _ in ours.named_modules() if n.endswith("lora_A")} == {
        n for n, _ in theirs.named_modules() if n.endswith("lora_A")
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_merged_model_keeps_its_number_format_and_tells_what_rounding_costs(
    dtype: torch.dtype, tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path
) -> None:
    source, _ = saved(cast(tiny_folder("qwen3"), dtype, tmp_path / "base"))
    found = export(source, "merged", tmp_path / "out")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    assert f"torch.{found.dtype}" == str(dtype)
    assert found.beyond_rounding < 1e-4 < 1e-3 < found.largest < found.limit
    with pytest.raises(Different, match=r"limit 0\.001.*rounding to .*float16 leaves"):
        export(source, "merged", tmp_path / "strict", limit=1e-3)


# Planted mistakes ---------------------------------------------------------------------------------------------------


def test_a_scale_that_is_two_percent_off_is_caught_even_under_rounding(
    tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = saved(cast(tiny_folder("llama"), torch.bfloat16, tmp_path / "base"))
    right = export_module.merged
    monkeypatch.setattr(export_module, "merged", lambda weight, scale, pair: right(weight, 1.02 * scale, pair))
    with pytest.raises(BadRequest, match="does not compute what the trainer does"):
        export(source, "merged", tmp_path / "out", limit=10.0)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_two_layers_that_changed_places_are_caught(
    tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = saved(tiny_folder("llama"))
    right = export_module.peft_tensors

    def swapped(weights: Any) -> Any:
        one, two = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
        return right({**weights, one: weights[two], two: weights[one]})

    monkeypatch.setattr(export_module, "peft_tensors", swapped)
    with pytest.raises(BadRequest, match=r"largest difference is .*Nothing was left behind"):
        export(source, "peft", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_numbers_are_caught(
    tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = saved(tiny_folder("llama"))
    monkeypatch.setattr(export_module, "merged", lambda weight, scale, pair: weight * float("nan"))
    with pytest.raises(BadRequest, match="nan"):
        export(source, "merged", tmp_path / "out")


def test_a_tokenizer_that_gives_other_tokens_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "checkpoint", random_adapter(BaseModel.load("mint/tiny"), EVERYTHING))

    def other(asked: Any) -> Any:
        answer = reload.answer(asked)
        return answer | {"texts": [tokens[1:] for tokens in answer["texts"]]}

    monkeypatch.setattr(export_proof, "_ask_new_process", other)
    with pytest.raises(Internal, match="tokenizer"):
        export(tmp_path / "checkpoint", "merged", tmp_path / "out")


def test_a_damaged_checkpoint_is_named_and_nothing_is_written(
    tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path
) -> None:
    source, _ = saved(tiny_folder("llama"))
    file = source / "adapter_model.safetensors"
    tensors = load_file(file)
    first = sorted(tensors)[0]
    save_file(tensors | {first: tensors[first] + 1}, file)
    with pytest.raises(BadRequest, match=r"damaged: adapter_model\.safetensors"):
        export(source, "peft", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_not_overwritten(tiny_folder: Callable[[str], Path], saved: Any, tmp_path: Path) -> None:
    source, _ = saved(tiny_folder("llama"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(BadRequest, match="exists and is not an empty folder"):
        export(source, "merged", tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"


# For llama.cpp ------------------------------------------------------------------------------------------------------


def test_gguf_ready_has_what_the_converter_reads(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoint", random_adapter(BaseModel.load("mint/tiny"), EVERYTHING))
    base = Path(BaseModel.load("mint/tiny").facts.folder)
    (tmp_path / "base").mkdir()
    for file in base.iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    told = json.loads((base / "tokenizer_config.json").read_text())
    template = told.pop("chat_template", None) or AutoTokenizer.from_pretrained(base).chat_template
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / "base" / "chat_template.jinja").write_text(template)
    export(tmp_path / "checkpoint", "gguf-ready", tmp_path / "out", base_model=str(tmp_path / "base"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rope_theta"] > 0 and config["torch_dtype"] == "float32"
    assert config["tie_word_embeddings"] is False and "lm_head.weight" in load_file(tmp_path / "out/model.safetensors")
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"] == template
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", base))
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


def test_the_probe_is_always_the_same_and_fits_the_model() -> None:
    assert export_proof.probe(None, 50, 8) == export_proof.probe(None, 50, 8)
    assert all(len(tokens) == 8 and max(tokens) < 50 for tokens in export_proof.probe(None, 50, 8))
