"""What the engine serves: adapters in training (`Tenant`) and frozen ones that are sampled (`Policy`).

Says which tensors each consists of, so that `residence` can take them away and bring them back. What is done with them
is the engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from mint.engine import checkpoint
from mint.engine.device import Device
from mint.engine.holdings import Holding
from mint.engine.lora import Adapter, joined
from mint.engine.model import BaseModel
from mint.engine.optimizer import AdamW
from mint.engine.sampler.grammar import Grammars
from mint.engine.sampler.sampler import Sampler
from mint.engine.trainer import Trainer
from mint.engine.verify import History, Proof, Verifier
from mint.errors import Lost, MintError


class Runtime:
    """A base model with its trainer and its sampler."""

    def __init__(self, name: str, device: Device | None, lean: bool = False) -> None:
        self.model = BaseModel.load(name, device)
        self.trainer = Trainer(self.model, lean=lean)
        self.sampler = Sampler(self.model)
        self.grammars = Grammars(self.model)
        self.verifier = Verifier(self.model, self.trainer, self.sampler)


@dataclass(eq=False)
class Trained:
    """All that the next step of an adapter in training depends on."""

    adapter: Adapter
    optimizer: AdamW
    frozen: bool = False

    def tensors(self) -> list[Tensor]:
        pending = [] if self.adapter.gradients_P is None else [self.adapter.gradients_P]
        return [self.adapter.values_P, *self.optimizer.moments(), *pending]

    def put(self, tensors: Sequence[Tensor]) -> None:
        values_P, mean_P, square_P, *pending = tensors
        self.adapter.put(values_P)
        self.optimizer.put_moments(mean_P, square_P)
        self.adapter.gradients_P = pending[0] if pending else None

    def leave_device(self) -> None:
        return


@dataclass(eq=False)
class Frozen:
    """The weights of a policy."""

    adapter: Adapter
    sampler: Sampler
    frozen: bool = True

    def tensors(self) -> list[Tensor]:
        return [self.adapter.values_P]

    def put(self, tensors: Sequence[Tensor]) -> None:
        self.adapter.put(tensors[0])

    def leave_device(self) -> None:
        self.sampler.forget(self.adapter)


@dataclass(frozen=True)
class Tenant:
    """An adapter in training."""

    runtime: Runtime
    adapter: Adapter
    optimizer: AdamW
    holding: Holding
    history: History = field(default_factory=History)


@dataclass(frozen=True)
class Policy:
    """Weights that do not change any more; without an adapter, and then without a holding, the base model's own."""

    runtime: Runtime
    adapter: Adapter | None
    holding: Holding | None
    proof: Proof


@dataclass(frozen=True)
class SnapshotFolder:
    """A snapshot that was written for its client is a copy to come back from."""

    folder: Path
    paths: tuple[str, ...]
    dtype: torch.dtype

    def read(self) -> list[Tensor]:
        try:
            saved = checkpoint.read(self.folder)
        except MintError as error:
            raise Lost(str(error)) from error
        return [joined([tensor for path in self.paths for tensor in saved.weights[path]]).to(self.dtype)]
