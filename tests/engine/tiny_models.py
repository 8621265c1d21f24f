"""Tiny random models of each family the engine is tested on, as transformers folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

VOCAB = 97
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    # Larger than usual, so that logits and gradients are far from zero and a wrong one shows.
    initializer_range=0.3,
)

_GEMMA3: dict[str, Any] = dict(
    **_COMMON,
    head_dim=16,
    query_pre_attn_scalar=20,
    sliding_window=6,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)


def config(family: str) -> Any:
    if family == "long":  # not one of FAMILIES: for what needs long prompts
        return Qwen3Config(**_COMMON | {"max_position_embeddings": 1024}, tie_word_embeddings=True, head_dim=16)
    if family == "gemma3_plain":  # nor this: as it is published, without softcaps
        return Gemma3TextConfig(**_GEMMA3)
    if family == "llama":
        return LlamaConfig(**_COMMON, tie_word_embeddings=False)
    if family == "qwen2":  # biases on q, k, v; the last layer has a sliding window
        return Qwen2Config(
            **_COMMON, tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=2
        )
    if family == "qwen3":  # norms on q and k; heads wider than hidden / heads
        return Qwen3Config(**_COMMON, tie_word_embeddings=True, head_dim=16)
    assert family == "gemma3", family  # windows and another rope on all but each third layer; both softcaps known
    return Gemma3TextConfig(**_GEMMA3, final_logit_softcapping=20.0)


def save(family: str, folder: Path) -> Path:
    """Writes the model of a family, the same weights every time, biases and norms random too."""
    torch.manual_seed((*FAMILIES, "long", "gemma3_plain").index(family))
    model = AutoModelForCausalLM.from_config(config(family), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
