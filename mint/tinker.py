"""The same names with the Tinker SDK's defaults: `from mint import tinker` runs code written for that SDK.

What differs from `import mint`: the defaults of `AdamParams` (learning rate 1e-4, beta2 0.95, eps 1e-12), a LoRA rank
of 32, and the order of `ServiceClient`'s arguments. `types` holds the same differences.
"""
# ruff: noqa: F401, F403 (names to be imported from here)

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import mint.client
import mint.types
from mint.client import APIFuture, RestClient, SamplingClient, TrainingClient
from mint.errors import *
from mint.types import *
from mint.version import __version__

SDK_RANK = 32


@dataclass(frozen=True)
class AdamParams(mint.types.AdamParams):  # type: ignore[no-redef]
    learning_rate: float = 1e-4
    beta2: float = 0.95
    eps: float = 1e-12


@dataclass(frozen=True)
class LoraConfig(mint.types.LoraConfig):  # type: ignore[no-redef]
    rank: int = SDK_RANK


class ServiceClient(mint.client.ServiceClient):
    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
    ) -> None:
        super().__init__(base_url, api_key, user_metadata, project_id)

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = SDK_RANK,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        return super().create_lora_training_client(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata
        )

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = SDK_RANK,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        return await super().create_lora_training_client_async(
            base_model, rank, seed, train_mlp, train_attn, train_unembed, user_metadata
        )


types = ModuleType("mint.tinker.types", "`mint.types` with the Tinker SDK's defaults.")
vars(types).update({name: getattr(mint.types, name) for name in mint.types.__all__})
vars(types).update(AdamParams=AdamParams, LoraConfig=LoraConfig)
sys.modules[types.__name__] = types  # so that `from mint.tinker.types import ...` works as well
