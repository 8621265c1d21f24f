"""LoRA in PEFT's words: the names of its tensors, its adapter_config.json, and what of it means something else here.

Files, and whether they are whole, are the business of `mint.engine.checkpoint`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.nn.functional import pad

from mint.engine.lora import Pair, group_of
from mint.errors import BadRequest
from mint.types import LoraConfig

PEFT_PREFIX = "base_model.model."


class Lora(Protocol):
    """What PEFT has to be told of an adapter, in training or read from a folder."""

    @property
    def config(self) -> LoraConfig: ...
    @property
    def scale(self) -> float: ...
    @property
    def weights(self) -> dict[str, Pair]: ...


def peft_tensors(weights: Mapping[str, Pair]) -> dict[str, Tensor]:
    tensors = {}
    for path, (down, up) in weights.items():
        tensors[f"{PEFT_PREFIX}{path}.lora_A.weight"] = down
        tensors[f"{PEFT_PREFIX}{path}.lora_B.weight"] = up
    return tensors


def peft_config(base_model: str, lora: Lora, linears: Collection[str] = ()) -> dict[str, Any]:
    """`linears` are all that the base model has: a target is told by the last part of its name only if all linears of
    that name are adapted."""
    rank = lora.config.rank
    partly = {_last(path) for path in linears if path not in lora.weights}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": _tidy(lora.scale * rank),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({path if _last(path) in partly else _last(path) for path in lora.weights}),
        "inference_mode": True,
    }


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _tidy(number: float) -> float:
    return int(number) if number == int(number) else number


def check_config(file: Path, peft: Mapping[str, Any]) -> None:
    """Refuses what would change the meaning of the weights and is not understood here."""
    if peft.get("peft_type") != "LORA" or "r" not in peft or "lora_alpha" not in peft:
        raise BadRequest(f"{file} does not describe a LoRA (peft_type LORA with r and lora_alpha).")
    for key in ("use_dora", "modules_to_save", "fan_in_fan_out", "layer_replication"):
        if peft.get(key):
            raise BadRequest(f"{file} sets {key} = {peft[key]!r}; only plain LoRA can be loaded.")
    if peft.get("bias", "none") != "none":
        raise BadRequest(f"{file} sets bias = {peft['bias']!r}; only plain LoRA can be loaded.")


def pairs(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, half = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        if half not in ("lora_A", "lora_B"):
            raise BadRequest(
                f"{file} holds {name}, which is not a LoRA matrix (lora_A or lora_B). PEFT adds a copy of an embedding "
                "that it adapts, unless told save_pretrained(..., save_embedding_layers=False)."
            )
        halves.setdefault(path, {})[half] = tensor.float()
    single = [path for path, pair in halves.items() if len(pair) != 2]
    if single or not halves:
        raise BadRequest(f"{file} lacks one of A and B for {single[0] if single else 'every linear'}.")
    return {path: (pair["lora_A"], pair["lora_B"]) for path, pair in halves.items()}


def one_rank(weights: Mapping[str, Pair], peft: Mapping[str, Any]) -> tuple[dict[str, Pair], int, float]:
    """The same LoRA with one rank and one scale, where PEFT's patterns give some linears their own: rows and columns
    of zeros add nothing and never change, and a scale can be part of B."""
    ranks, alphas = peft.get("rank_pattern") or {}, peft.get("alpha_pattern") or {}

    def scale_of(path: str, rank: int) -> float:
        alpha = _by_pattern(alphas, path, peft["lora_alpha"])
        return alpha / (math.sqrt(rank) if peft.get("use_rslora") else rank)

    if not ranks and not alphas:
        return dict(weights), int(peft["r"]), scale_of("", int(peft["r"]))
    rank = max([int(peft["r"]), *ranks.values()])
    scale = scale_of("", rank)
    return (
        {
            path: (
                pad(down, (0, 0, 0, rank - down.shape[0])),
                pad(up * (scale_of(path, down.shape[0]) / scale), (0, rank - up.shape[1])),
            )
            for path, (down, up) in weights.items()
        },
        rank,
        scale,
    )


def _by_pattern(patterns: Mapping[str, float], path: str, otherwise: float) -> float:
    """As PEFT looks them up: the first pattern that the path, or an end of it, matches."""
    return next((v for pattern, v in patterns.items() if re.match(rf"(.*\.)?({pattern})$", path)), otherwise)


def config_of(rank: int, weights: Mapping[str, Pair]) -> LoraConfig:
    groups = {group_of(path) for path in weights}
    return LoraConfig(
        rank=rank, train_unembed="unembed" in groups, train_mlp="mlp" in groups, train_attn="attn" in groups
    )
