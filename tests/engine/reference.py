"""Independent references: transformers and PEFT run one unpadded sequence at a time, and autograd does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from mint.engine.lora import Adapter
from mint.types import Datum, LoraConfig, ModelInput


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def peft_model(folder: Path, adapter: Adapter) -> Any:
    """PEFT's own model with the adapter's weights copied in; returns it trainable."""
    targets = sorted({path.rpartition(".")[2] for path in adapter.weights})
    settings = PeftLoraConfig(
        r=adapter.config.rank, lora_alpha=adapter.scale * adapter.config.rank, target_modules=targets, lora_dropout=0.0
    )
    model = get_peft_model(plain_model(folder), settings)
    with torch.no_grad():
        for path, (down, up) in adapter.weights.items():
            layer = model.base_model.model.get_submodule(path)
            layer.lora_A["default"].weight.copy_(down)
            layer.lora_B["default"].weight.copy_(up)
    return model


def peft_gradients(model: Any, adapter: Adapter) -> list[Tensor]:
    """PEFT's gradients in the order of the adapter's parameters."""
    layers = [model.base_model.model.get_submodule(path) for path in adapter.weights]
    return [half["default"].weight.grad for layer in layers for half in (layer.lora_A, layer.lora_B)]


def logits(model: Any, tokens: Sequence[int]) -> Tensor:
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def logprobs(model: Any, datum: Datum, temperature: float = 1.0) -> Tensor:
    """Log-probs of a datum's targets, by a plain log-softmax."""
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    full = torch.log_softmax(logits(model, datum.model_input.to_ints()) / temperature, dim=-1)
    return full.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)


def random_adapter(model: Any, config: LoraConfig, seed: int = 0) -> Adapter:
    """An adapter whose B is not zero, so that it does something."""
    adapter = model.new_adapter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, up in adapter.weights.values():
            up.copy_(torch.empty(up.shape).normal_(std=0.05, generator=generator))
    return adapter


def random_tokens(rng: np.random.Generator, length: int, vocab: int = 97) -> list[int]:
    return rng.integers(0, vocab, length).tolist()


def policy_datum(rng: np.random.Generator, length: int, prompt: int, **inputs: Any) -> Datum:
    """A datum as RL code makes it: a prompt of weight 0, then tokens with log-probs and advantages."""
    tokens = random_tokens(rng, length + 1)
    weights = np.where(np.arange(length) < prompt, 0.0, 1.0)
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": tokens[1:],
            "weights": weights,
            "logprobs": -4 + rng.normal(size=length),
            "advantages": weights * rng.normal(size=length),
            **inputs,
        },
    )


def group_data(seed: int, prompts: Sequence[int], answers: Sequence[Sequence[int]]) -> list[Datum]:
    """For each prompt, datums of those answer lengths; targets and weights as nobody would choose them."""
    rng = np.random.default_rng(seed)
    data = []
    for prompt, lengths in zip(prompts, answers, strict=True):
        common = rng.integers(0, 97, prompt)
        for length in lengths:
            tokens = np.concatenate([common, rng.integers(0, 97, length)])
            weights = rng.normal(size=len(tokens)) * (rng.random(len(tokens)) < 0.7)
            inputs = {
                "target_tokens": rng.integers(0, 97, len(tokens)),
                "weights": weights,
                "logprobs": -4 + rng.normal(size=len(tokens)),
                "advantages": rng.normal(size=len(tokens)),
            }
            data.append(Datum(ModelInput.from_ints(tokens.tolist()), inputs))
    rng.shuffle(data)  # type: ignore[arg-type]
    return data


SHARED = {
    "a group": ([20], [[5, 9, 1, 12]]),
    "an answer of no tokens": ([24], [[0, 7, 0]]),
    "groups, singles and a short prompt": ([33, 17, 11, 40], [[8, 8, 3], [2, 20], [4, 5, 6], [9]]),
    "nothing in common": ([0, 0, 0], [[13], [21], [5]]),
}
