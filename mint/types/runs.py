"""Training runs and the checkpoints they left, with the paths that name them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from mint.errors import BadRequest

CheckpointType = Literal["training", "sampler", "external"]
CHECKPOINT_KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


@dataclass(frozen=True)
class Cursor:
    offset: int
    limit: int
    total_count: int


@dataclass(frozen=True)
class Checkpoint:
    checkpoint_id: str
    """`{kind}/{name}`, kind being weights, sampler_weights or external_weights."""
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    expires_at: datetime | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class TrainingRun:
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class TrainingRunsResponse:
    training_runs: list[TrainingRun]
    cursor: Cursor


@dataclass(frozen=True)
class CheckpointsListResponse:
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


@dataclass(frozen=True)
class CheckpointArchiveUrlResponse:
    url: str
    expires: datetime


@dataclass(frozen=True)
class ParsedCheckpointTinkerPath:
    """`tinker://<training run>/<kind>/<name>`; `mint://` says the same."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, path: str) -> ParsedCheckpointTinkerPath:
        scheme, separator, rest = path.partition("://")
        parts = rest.split("/")
        known = scheme in ("tinker", "mint") and separator and len(parts) == 3 and all(parts)
        if not known or parts[1] not in CHECKPOINT_KINDS:
            raise BadRequest(
                f"{path!r} is not a checkpoint path; expected tinker://<training run>/<weights|sampler_weights>/<name> "
                "as returned by save_state and save_weights_for_sampler."
            )
        return cls(f"tinker://{rest}", parts[0], CHECKPOINT_KINDS[parts[1]], f"{parts[1]}/{parts[2]}")
