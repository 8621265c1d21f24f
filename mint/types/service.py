"""What a server says about itself: models, losses, sessions and what was used. Runs and checkpoints are in `runs`."""

from __future__ import annotations

from dataclasses import dataclass, field

ModelID = str


@dataclass(frozen=True)
class SupportedModel:
    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True)
class GetServerCapabilitiesResponse:
    supported_models: list[SupportedModel]
    loss_fns: dict[str, dict[str, float | str]] = field(default_factory=dict)
    """Every loss by name, with its options and their defaults."""
    honoured: dict[str, list[str]] = field(default_factory=dict)
    """The fields that change something, by the part of a request they belong to."""
    refused: dict[str, str] = field(default_factory=dict)
    """Fields of the protocol that are answered with an error, and why. Any other field is refused too."""


@dataclass(frozen=True)
class ModelData:
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@dataclass(frozen=True)
class GetInfoResponse:
    model_id: str
    model_data: ModelData
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


@dataclass(frozen=True)
class WeightsInfoResponse:
    base_model: str
    is_lora: bool = True
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


@dataclass(frozen=True)
class GetSamplerResponse:
    sampler_id: str
    base_model: str
    model_path: str | None = None


@dataclass(frozen=True)
class ListSessionsResponse:
    sessions: list[str]


@dataclass(frozen=True)
class GetSessionResponse:
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class Usage:
    """What one key used for one run, or under the empty name for none."""

    key: str
    """The key's name."""
    owner: str
    """Its id, which stays when the name changes."""
    run: str
    requests: int
    prompt_tokens: int
    """Prompts, and what was scored without training on it."""
    sampled_tokens: int
    trained_tokens: int
    engine_seconds: float
    disk_bytes: int
    """Of the checkpoints there are now."""


@dataclass(frozen=True)
class UsageResponse:
    usage: list[Usage]
