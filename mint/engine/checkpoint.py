"""Adapters on disk: a folder that PEFT reads, written whole or not at all, and checked when read.

    adapter_model.safetensors   weights under PEFT's names
    adapter_config.json         PEFT's settings
    optimizer.safetensors       AdamW's state, in training checkpoints
    gradients.safetensors       gradients that no step has used yet, in internal states
    mint.json                   format, base model, LoRA settings, step, SHA-256 of each file above
    checkpoint_complete         empty; tools around the Tinker API look for it

A plain PEFT folder, without mint.json, is read as well: weights only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mint.engine.folders import recover, replacing, sha256
from mint.engine.lora import Adapter, LoraLinear, Pair, group_of, joined
from mint.engine.optimizer import AdamW
from mint.engine.peft_format import check_config, config_of, one_rank, pairs, peft_config, peft_tensors
from mint.engine.tensor_files import read_tensors, write_tensors
from mint.errors import BadRequest, NotFound
from mint.types import LoraConfig

FORMAT = 1
WEIGHTS, PEFT_CONFIG, OPTIMIZER = "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"
GRADIENTS = "gradients.safetensors"
MANIFEST, COMPLETE = "mint.json", "checkpoint_complete"


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds, verified, on the CPU."""

    folder: Path
    base_model: str
    config: LoraConfig
    scale: float
    step: int
    weights: dict[str, Pair]
    optimizer: dict[str, Tensor] | None
    gradients: dict[str, Tensor] | None = None

    @torch.no_grad()
    def load_into(self, adapter: Adapter, optimizer: AdamW, with_optimizer: bool) -> None:
        """Replaces the adapter's weights, and its optimizer's state by the saved or a fresh one; pending gradients are
        dropped. Nothing changes if anything does not fit."""
        if self.config.rank != adapter.config.rank or set(self.weights) != set(adapter.weights):
            raise BadRequest(
                f"{self.folder} holds a LoRA of {_describe(self.config, self.weights)}; the model to load it into has "
                f"{_describe(adapter.config, adapter.weights)}. Create the model with the same rank and train_* flags."
            )
        self._check_shapes({path: (a.shape[1], b.shape[0]) for path, (a, b) in adapter.weights.items()})
        if with_optimizer:
            if self.optimizer is None:
                raise BadRequest(f"{self.folder} holds no optimizer state ({OPTIMIZER}); load the weights alone.")
            optimizer.load_state(self.optimizer)
        else:
            optimizer.reset()
        for path, (down, up) in adapter.weights.items():
            saved_down, saved_up = self.weights[path]
            down.copy_(saved_down)
            up.copy_(saved_up * (self.scale / adapter.scale))
        adapter.gradients_P = None

    def policy(self, linears: Mapping[str, LoraLinear], dtype: torch.dtype | None = None) -> Adapter:
        """A frozen adapter for these linears, on their device."""
        unknown = [path for path in self.weights if path not in linears]
        if unknown:
            raise BadRequest(f"{self.folder} adapts {unknown[0]}, which the base model does not have.")
        self._check_shapes({path: (linears[path].in_features, linears[path].out_features) for path in self.weights})
        placed = {
            path: (down.to(linears[path].weight.device, dtype), up.to(linears[path].weight.device, dtype))
            for path, (down, up) in self.weights.items()
        }
        return Adapter(self.base_model, self.config, placed, scale=self.scale, trainable=False)

    def _check_shapes(self, expected: Mapping[str, tuple[int, int]]) -> None:
        rank = self.config.rank
        for path, (down, up) in self.weights.items():
            width, height = expected[path]
            if down.shape != (rank, width) or up.shape != (height, rank):
                raise BadRequest(
                    f"{self.folder}: {path} has A {list(down.shape)} and B {list(up.shape)}; the base model needs "
                    f"{[rank, width]} and {[height, rank]}. It was made for another base model ({self.base_model})."
                )


@dataclass(frozen=True)
class Contents:
    """What is to be written. The tensors must not change until it has been."""

    adapter: Adapter
    step: int = 0
    optimizer: Mapping[str, Tensor] | None = None
    gradients: Mapping[str, Tensor] | None = None

    def write(self, folder: Path, flush: bool = True) -> int:
        """The bytes it takes. Without `flush` a power cut may damage it, which is noticed when it is read."""
        with replacing(folder, flush) as fresh:
            write_tensors(fresh / WEIGHTS, peft_tensors(self.adapter.weights), {"format": "pt"})
            _write_json(fresh / PEFT_CONFIG, peft_config(self.adapter.base_model, self.adapter))
            for name, more in ((OPTIMIZER, self.optimizer), (GRADIENTS, self.gradients)):
                if more is not None:
                    write_tensors(fresh / name, more)
            manifest = {
                "format": FORMAT,
                "base_model": self.adapter.base_model,
                "lora": asdict(self.adapter.config),
                "step": self.step,
                "sha256": {path.name: sha256(path) for path in sorted(fresh.iterdir())},
            }
            _write_json(fresh / MANIFEST, manifest)
            (fresh / COMPLETE).touch()
        return sum(path.stat().st_size for path in folder.iterdir())


def save(folder: str | Path, adapter: Adapter, optimizer: AdamW | None = None) -> int:
    """Writes the adapter, and the optimizer's state if given; the bytes it takes."""
    if optimizer is None:
        return Contents(adapter).write(Path(folder))
    return Contents(adapter, optimizer.steps, optimizer.state()).write(Path(folder))


def state_of(adapter: Adapter, optimizer: AdamW) -> Contents:
    """A copy of everything later work depends on: it can be written while training goes on."""
    gradients = None
    if adapter.gradients is not None:
        gradients = {str(n): gradient.clone() for n, gradient in enumerate(adapter.gradients)}
    return Contents(adapter.snapshot(), optimizer.steps, optimizer.state(), gradients)


def load_state(folder: str | Path, adapter: Adapter, optimizer: AdamW) -> None:
    """Makes adapter and optimizer what they were when `state_of` was called."""
    saved = read(folder)
    saved.load_into(adapter, optimizer, with_optimizer=True)
    if saved.gradients is not None:
        gradients_P = joined([saved.gradients[str(n)] for n in range(len(saved.gradients))])
        adapter.accumulate(gradients_P.to(adapter.values_P.device))


def read(folder: str | Path) -> Checkpoint:
    folder = Path(folder)
    recover(folder)
    if not folder.is_dir():
        raise NotFound(f"there is no checkpoint folder {folder}.")
    manifest = _read_json(folder / MANIFEST) if (folder / MANIFEST).exists() else {}
    if manifest.get("format", FORMAT) != FORMAT:
        raise BadRequest(f"{folder} has checkpoint format {manifest['format']}; this version of MinT reads {FORMAT}.")
    for name, digest in manifest.get("sha256", {}).items():
        if not (folder / name).is_file():
            raise BadRequest(f"checkpoint {folder} is damaged: {name} is missing.")
        if sha256(folder / name) != digest:
            raise BadRequest(f"checkpoint {folder} is damaged: {name} does not match its SHA-256 in {MANIFEST}.")
    peft = _read_json(folder / PEFT_CONFIG)
    check_config(folder / PEFT_CONFIG, peft)
    weights, rank, scale = one_rank(pairs(folder / WEIGHTS, _read_tensors(folder / WEIGHTS)), peft)
    return Checkpoint(
        folder=folder,
        base_model=manifest.get("base_model") or peft.get("base_model_name_or_path") or "unknown",
        config=LoraConfig(**manifest["lora"]) if manifest else config_of(rank, weights),
        scale=scale,
        step=manifest.get("step", 0),
        weights=weights,
        optimizer=_read_tensors(folder / OPTIMIZER) if OPTIMIZER in manifest.get("sha256", {}) else None,
        gradients=_read_tensors(folder / GRADIENTS) if GRADIENTS in manifest.get("sha256", {}) else None,
    )


def _describe(config: LoraConfig, weights: Mapping[str, Pair]) -> str:
    return f"rank {config.rank} on {len(weights)} linears ({', '.join(sorted({group_of(path) for path in weights}))})"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadRequest(f"checkpoint {path.parent} is damaged: {path.name} cannot be read ({error}).") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise BadRequest(f"checkpoint {path.parent} is damaged: {path.name} cannot be read ({error}).") from error
