"""What the calls of a training client take by name, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mint.types.tensors import TensorData

LossFnType = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
LossFnConfig = Mapping[str, float | str]


@dataclass(frozen=True)
class ForwardBackwardOutput:
    loss_fn_outputs: list[dict[str, TensorData]]
    """One dict a datum; `logprobs` holds the log-prob of every target token."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Names end in how chunks combine: `loss:sum`, `ratio:mean`, `ratio:max`."""
    loss_fn_output_type: str = "TensorDict"


@dataclass(frozen=True)
class OptimStepResponse:
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveWeightsResponse:
    path: str


@dataclass(frozen=True)
class SaveWeightsForSamplerResponse:
    path: str | None = None
    sampling_session_id: str | None = None


@dataclass(frozen=True)
class LoadWeightsResponse:
    path: str | None = None
    model_id: str | None = None
