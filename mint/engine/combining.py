"""Weighted sums of saved adapters.

What is added up is what each does to the base model's weights, scale * B A, so that adapters of any ranks, on any
linears, combine exactly: A's under one another, B's side by side, the rank the sum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mint.engine import checkpoint
from mint.engine.lora import Adapter, Pair
from mint.engine.peft_format import config_of
from mint.errors import BadRequest
from mint.types import MAX_RANK, LoraConfig


def combine(folders: Sequence[str], coefficients: Sequence[float], folder: str) -> LoraConfig:
    """Writes the sum of the adapters in `folders`, each times its coefficient; its shape."""
    parts = [checkpoint.read(source) for source in folders]
    bases = {part.base_model for part in parts}
    if len(bases) > 1:
        raise BadRequest(f"the checkpoints are of different base models ({', '.join(sorted(bases))}).")
    rank = sum(part.config.rank for part in parts)
    if rank > MAX_RANK:
        raise BadRequest(f"the checkpoints' ranks add up to {rank}; at most {MAX_RANK} can be combined.")
    places = [sum(part.config.rank for part in parts[:n]) for n in range(len(parts))]
    weights: dict[str, Pair] = {}
    for part, coefficient, place in zip(parts, coefficients, places, strict=True):
        rows = slice(place, place + part.config.rank)
        for path, (down, up) in part.weights.items():
            if path not in weights:
                weights[path] = torch.zeros(rank, down.shape[1]), torch.zeros(up.shape[0], rank)
            sum_down, sum_up = weights[path]
            if (down.shape[1], up.shape[0]) != (sum_down.shape[1], sum_up.shape[0]):
                raise BadRequest(f"{path} has another shape in one of the checkpoints: they are of different models.")
            sum_down[rows] = down
            sum_up[:, rows] = up * (coefficient * part.scale)
    adapter = Adapter(parts[0].base_model, config_of(rank, weights), weights, scale=1.0, trainable=False)
    checkpoint.Contents(adapter).write(Path(folder))
    return adapter.config
