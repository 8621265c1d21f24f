"""Checkpoints as folders that other programs load, each proved to compute what the trainer computes.

    peft         adapter_model.safetensors and adapter_config.json, for PEFT over the base model
    merged       the whole model with the adapter added in, in its own number format, with tokenizer and chat template
    gguf-ready   the same, with a config and tokenizer settings that llama.cpp's converter reads

What was written is loaded in a new process by transformers (and PEFT) alone (`mint.engine.reload`), and its log-probs
of fixed tokens are compared with the trainer's. A folder that differs by more than the limit does not come to be.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mint.engine import checkpoint
from mint.engine.checkpoint import Checkpoint
from mint.engine.device import Device, pick_device
from mint.engine.folders import replacing
from mint.engine.hub import find_folder
from mint.engine.lora import UNEMBEDDING
from mint.engine.model import BaseModel
from mint.engine.peft_format import peft_config, peft_tensors
from mint.engine.trainer import Trainer
from mint.errors import BadRequest, Internal
from mint.types import Datum, ModelInput, TensorData

FORMATS = ("peft", "merged", "gguf-ready")
RECORD = "mint_export.json"
"""What was exported and how closely it was found to agree."""
LIMITS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Largest difference of a log-prob, by the format weights are written in. In float32 it is a matter of order of
summation. Adding an adapter to half-precision weights rounds the sum, which `docs/export.md` measures; a wrong export
is off by whole units."""

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
PROBE_TEXTS = (
    "Q: What is 47 + 38?\nA: 85\n\nThe quick brown fox jumps over the lazy dog; 3.14159, 2.71828.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 40))  # 42\n",
)
_PROBE_TOKENS = 96


@dataclass(frozen=True)
class Difference:
    """Between the log-probs of what was written and the trainer's."""

    largest: float
    mean: float
    tokens: int
    dtype: str
    """That the weights were written in."""
    limit: float


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
    truth = _trainers(saved, base, device)
    with replacing(out) as fresh:
        tell(f"writing the {form} folder")
        if form == "peft":
            dtype = _write_peft(saved, base_model or saved.base_model, truth.linears, fresh)
        else:
            dtype = _write_merged(saved, base, fresh)
            if form == "gguf-ready":
                _suit_converter(fresh)
        tell("loading it again with transformers")
        found = _reload(fresh, base if form == "peft" else None, truth, device)
        difference = _compare(truth.logprobs, found, dtype, LIMITS[dtype] if limit is None else limit)
        _write_json(fresh / RECORD, {"checkpoint": told, "format": form, "difference": asdict(difference)})
        for path in fresh.iterdir():
            path.chmod(0o644)  # safetensors lets only its owner read what it writes
    return difference


# The trainer --------------------------------------------------------------------------------------------------------


def probe(tokenizer: Any, vocab_size: int, max_context: int) -> list[list[int]]:
    """The fixed tokens: two texts, and two sequences of ids from all over the vocabulary, where a row of the embedding
    that went astray shows."""
    length = min(_PROBE_TOKENS, max_context)
    draw = random.Random(0)
    drawn = [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(2)]
    texts = [tokenizer.encode(text)[:length] for text in PROBE_TEXTS] if tokenizer is not None else []
    return [tokens for tokens in (*texts, *drawn) if len(tokens) > 1]


@dataclass(frozen=True)
class _Truth:
    """What the trainer says."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    texts: list[list[int]]
    """Tokens of `PROBE_TEXTS`; empty for a model without a tokenizer."""
    linears: list[str]


def _trainers(saved: Checkpoint, base: Path, device: Device) -> _Truth:
    model = BaseModel.load(str(base), device)
    tokenizer = model.tokenizer if any((base / name).exists() for name in _TOKENIZER_FILES[:3]) else None
    tokens = probe(tokenizer, model.facts.vocab_size, model.facts.max_context)
    targets = [TensorData.of(np.array(ids[1:])) for ids in tokens]
    data = [Datum(ModelInput.from_ints(i[:-1]), {"target_tokens": t}) for i, t in zip(tokens, targets, strict=True)]
    work = Trainer(model).forward_backward(saved.policy(model.linears), data, "cross_entropy", None, backward=False)
    try:
        while True:
            next(work)
    except StopIteration as done:
        logprobs = [output["logprobs"].to_numpy().tolist() for output in done.value.loss_fn_outputs]
    texts = [tokenizer.encode(text) for text in PROBE_TEXTS] if tokenizer is not None else []
    return _Truth(tokens, logprobs, texts, list(model.linears))


# Writing ------------------------------------------------------------------------------------------------------------


def _write_peft(saved: Checkpoint, base_model: str, linears: Sequence[str], folder: Path) -> torch.dtype:
    tensors = peft_tensors(saved.weights)
    checkpoint.write_tensors(folder / checkpoint.WEIGHTS, tensors, {"format": "pt"})
    _write_json(folder / checkpoint.PEFT_CONFIG, peft_config(base_model, saved, linears))
    return torch.float32


@torch.no_grad()
def _write_merged(saved: Checkpoint, base: Path, folder: Path) -> torch.dtype:
    module = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    config = json.loads((base / "config.json").read_text())
    if UNEMBEDDING in saved.weights and _untie(module):
        for part in (config, config.get("text_config", {})):
            part["tie_word_embeddings"] = False
    for path, (down, up) in saved.weights.items():
        linear = module.get_submodule(path)
        linear.weight.copy_(_sum(linear.weight, saved.scale, down, up))
    module.save_pretrained(folder)
    # The base model's own settings, in the words of the version of transformers that wrote them: programs that read the
    # base model read this one.
    config["architectures"] = [type(module).__name__]
    _write_json(folder / "config.json", config)
    for name in _TOKENIZER_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    return module.dtype


def _sum(weight: Tensor, scale: float, down: Tensor, up: Tensor) -> Tensor:
    return weight.float() + scale * (up.to(weight.device) @ down.to(weight.device))


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


# Proving ------------------------------------------------------------------------------------------------------------


def _reload(folder: Path, base: Path | None, truth: _Truth, device: Device) -> list[list[float]]:
    """The log-probs a new process finds, in which nothing of the engine is loaded."""
    asked = {
        "folder": str(folder),
        "base": str(base) if base else None,
        "tokens": truth.tokens,
        "texts": PROBE_TEXTS if truth.texts and base is None else [],
        "device": str(device.torch_device),
    }
    answer = _ask_new_process(asked)
    if asked["texts"] and answer["texts"] != truth.texts:
        raise Internal("the tokenizer that was written does not give the tokens of the base model's.")
    return answer["logprobs"]


def _ask_new_process(asked: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "mint.engine.reload"], input=json.dumps(asked), capture_output=True, text=True
    )
    if done.returncode:
        raise Internal(f"what was written cannot be loaded by transformers: {_last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without a word"])[-1]


def _compare(expected: list[list[float]], found: list[list[float]], dtype: torch.dtype, limit: float) -> Difference:
    """Refuses what is too far off, or not a number."""
    gaps = torch.cat(
        [(torch.tensor(a, dtype=torch.float64) - torch.tensor(b)).abs() for a, b in zip(expected, found, strict=True)]
    )
    largest, mean = float(gaps.max()), float(gaps.mean())
    if not largest <= limit:
        raise BadRequest(
            f"what was written does not compute what the trainer does: of {len(gaps)} log-probs the largest difference "
            f"is {largest:.3g}, the mean {mean:.3g}, and the limit {limit:.3g}. Nothing was left behind."
            + _advice(dtype)
        )
    return Difference(largest, mean, len(gaps), str(dtype).removeprefix("torch."), limit)


def _advice(dtype: torch.dtype) -> str:
    if dtype == torch.float32:
        return ""
    return (
        f" Some of it is rounding: the sum of weights and adapter is written in {str(dtype).removeprefix('torch.')}; a "
        "PEFT folder (--to peft) rounds nothing."
    )
