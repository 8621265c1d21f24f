"""Checkpoints as folders that other programs load, each proved to compute what the trainer computes.

    peft         adapter_model.safetensors and adapter_config.json, for PEFT over the base model
    merged       the whole model with the adapter added in, in its own number format, with tokenizer and chat template
    gguf-ready   the same, with a config and tokenizer settings that llama.cpp's converter reads

A folder whose log-probs differ from the trainer's by more than the limit (`mint.engine.export_proof`) does not come to
be.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mint.engine import checkpoint
from mint.engine.checkpoint import Checkpoint
from mint.engine.device import Device, pick_device
from mint.engine.export_proof import LIMITS, Difference, compare, reload, trainers_truth
from mint.engine.folders import replacing
from mint.engine.hub import find_folder
from mint.engine.lora import UNEMBEDDING, merged
from mint.engine.peft_format import peft_config, peft_tensors
from mint.engine.tensor_files import write_tensors
from mint.errors import BadRequest, Internal

FORMATS = ("peft", "merged", "gguf-ready")
RECORD = "mint_export.json"
"""What was exported and how closely it was found to agree."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
Tell = Callable[[str], None]
"""Called with what is being done now."""


def export(
    source: Path,
    form: str,
    out: Path,
    limit: float | None = None,
    base_model: str | None = None,
    tell: Tell = lambda _: None,
) -> Difference:
    """Writes the checkpoint in folder `source` to `out`, which must not exist, and proves it. `base_model` says where
    the base model is, if not where the checkpoint says; without a `limit`, that of `LIMITS`."""
    if form not in FORMATS:
        raise BadRequest(f"the format is {form!r}; it must be one of {', '.join(FORMATS)}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadRequest(f"{out} exists and is not an empty folder; name a new one, so that nothing is overwritten.")
    if form == "peft" and find_spec("peft") is None:
        raise Internal("a PEFT folder is proved by loading it with PEFT: pip install 'mint-rl[export]'.")
    tell("reading the checkpoint")
    saved = checkpoint.read(source)
    told = {"base_model": saved.base_model, "step": saved.step, "lora": asdict(saved.config)}
    base = find_folder(base_model or saved.base_model)
    device = Device(pick_device().torch_device, torch.float32, "two implementations agree closely in float32 only")
    tell("computing the trainer's log-probs")
    dtype = torch.float32 if form == "peft" else _dtype_of(base)
    truth = trainers_truth(saved, base, device, dtype)
    with replacing(out) as fresh:
        tell(f"writing the {form} folder")
        if form == "peft":
            _write_peft(saved, base_model or saved.base_model, truth.linears, fresh)
        else:
            _write_merged(saved, base, dtype, fresh)
            if form == "gguf-ready":
                _suit_converter(fresh)
        tell("loading it again with transformers")
        found = reload(fresh, base if form == "peft" else None, truth, device)
        difference = compare(truth, found, dtype, LIMITS[dtype] if limit is None else limit)
        _write_json(fresh / RECORD, {"checkpoint": told, "format": form, "difference": asdict(difference)})
        for path in fresh.iterdir():
            path.chmod(0o644)  # safetensors lets only its owner read what it writes
    return difference


# Writing ------------------------------------------------------------------------------------------------------------


def _write_peft(saved: Checkpoint, base_model: str, linears: Sequence[str], folder: Path) -> None:
    tensors = peft_tensors(saved.weights)
    write_tensors(folder / checkpoint.WEIGHTS, tensors, {"format": "pt"})
    _write_json(folder / checkpoint.PEFT_CONFIG, peft_config(base_model, saved, linears))


@torch.no_grad()
def _write_merged(saved: Checkpoint, base: Path, dtype: torch.dtype, folder: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, local_files_only=True)
    config = json.loads((base / "config.json").read_text())
    if UNEMBEDDING in saved.weights and _untie(module):
        for part in (config, config.get("text_config", {})):
            part["tie_word_embeddings"] = False
    for path, (down, up) in saved.weights.items():
        linear = module.get_submodule(path)
        linear.weight.copy_(merged(linear.weight, saved.scale, (down, up)))
    module.save_pretrained(folder)
    # The base model's own settings, in the words of the version of transformers that wrote them: programs that read the
    # base model read this one.
    config["architectures"] = [type(module).__name__]
    _write_json(folder / "config.json", config)
    for name in _TOKENIZER_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)


def _dtype_of(base: Path) -> torch.dtype:
    dtype = AutoConfig.from_pretrained(base, local_files_only=True).get_text_config().dtype or torch.float32
    if dtype not in LIMITS:
        raise BadRequest(
            f"{base} has weights in {dtype}; those that can be merged into are in {', '.join(map(str, LIMITS))}."
        )
    return dtype


def _untie(module: Any) -> bool:
    """Gives the unembedding weights of its own, where it shares those of the embedding."""
    head = module.get_output_embeddings()
    if head.weight is not module.get_input_embeddings().weight:
        return False
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for config in (module.config, module.config.get_text_config()):
        config.tie_word_embeddings = False
    return True


def _suit_converter(folder: Path) -> None:
    """llama.cpp's convert_hf_to_gguf.py reads the names that transformers used before version 5, and a chat template
    within tokenizer_config.json."""
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        rope = part.get("rope_parameters")
        if rope and "rope_type" in rope:  # one for all layers; where there are several, the converter knows the family
            part.setdefault("rope_theta", rope.get("rope_theta"))
            if rope["rope_type"] != "default":
                part.setdefault("rope_scaling", rope)
        if "dtype" in part:
            part.setdefault("torch_dtype", part["dtype"])
    _write_json(folder / "config.json", config)
    template, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if template.is_file() and settings.is_file():
        told = json.loads(settings.read_text())
        _write_json(settings, told | {"chat_template": template.read_text()})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
