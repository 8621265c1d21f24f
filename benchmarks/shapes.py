"""The model shapes benchmarks run on, with random weights, and the hardware they name in their results."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

# A peer in the process of an engine has MKL as torch has it. Ours, native on a CPU, does not use it.
os.environ.setdefault("MKL_CBWR", "AUTO")

SHAPES: dict[str, PreTrainedConfig] = {
    "small": Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "gemma3-270m": Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    ),
}


def save_model(shape: str, folder: Path) -> Path:
    """A transformers folder of that shape, the same random weights every time; in bfloat16, as models are published."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.float32).bfloat16().save_pretrained(folder)
    return folder


def hardware() -> dict[str, Any]:
    """What a figure was measured on."""
    cpu = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
        cpu = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts: dict[str, Any] = {"cpu": cpu, "cores": cores, "torch": torch.__version__}
    if hasattr(os, "getloadavg"):
        facts["load_at_start"] = round(os.getloadavg()[0], 2)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
