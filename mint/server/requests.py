"""The small request bodies, field by field; unknown fields are refused by name.

Bodies that carry token arrays (forward, forward_backward, asample) are read by `mint.wire` instead.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mint.errors import BadRequest
from mint.types import LoraConfig
from mint.wire import ReverseKLCall, check_text, reverse_kl_from_json


class ValidText(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _text_is_valid(cls, value: Any) -> Any:
        if isinstance(value, bytes):  # the body as it came, which FastAPI reads only if it is called JSON
            raise ValueError("this address takes JSON; send it with the header content-type: application/json")
        check_text(value)
        return value


class Body(ValidText):
    model_config = ConfigDict(strict=True)

    type: str | None = None
    """What kind of request this is, which the address says already."""


METADATA_CHARACTERS = 64 << 10
"""Of one session, run or checkpoint: what is said about it is kept for good."""


def _stringify(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    text = {str(key): item if isinstance(item, str) else repr(item) for key, item in value.items()}
    if (length := sum(len(key) + len(item) for key, item in text.items())) > METADATA_CHARACTERS:
        raise ValueError(f"metadata of {length} characters; at most {METADATA_CHARACTERS} are kept")
    return text


Metadata = Annotated[dict[str, str], BeforeValidator(_stringify)]
"""Free-form; values that are not text are kept as their repr."""
Number = Annotated[int, Field(ge=0, lt=2**63)]
Short = Annotated[str, Field(max_length=1024)]
"""Text that is kept for good."""


class ClientConfigBody(Body):
    """A newer client may say more about itself; a refusal here would keep it from starting."""

    model_config = ConfigDict(extra="ignore")

    sdk_version: str | None = None


class CreateSession(Body):
    tags: list[Short] = Field(default=[], max_length=64)
    user_metadata: Metadata | None = None
    sdk_version: Short | None = None
    project_id: Short | None = None
    display_name: Short | None = None


class Heartbeat(Body):
    session_id: str


class FinishReason(Body):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    reason: FinishReason
    detail: str | None = None


class Lora(Body):
    rank: int = 32  # what the SDK means when it leaves the rank out
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def config(self) -> LoraConfig:
        return LoraConfig(self.rank, self.seed, self.train_unembed, self.train_mlp, self.train_attn)


class OptimizerConfig(BaseModel):
    """Open-ended by `type`; every family but AdamW is refused by name."""

    model_config = ConfigDict(extra="allow")
    type: str

    def check(self) -> None:
        if self.type != "adamw":
            raise BadRequest(f"optimizer_config asks for {self.type!r}; this server has 'adamw' only.")
        if extra := sorted(self.model_extra or {}):
            raise BadRequest(f"optimizer_config has unknown field {', '.join(map(repr, extra))}; adamw takes none.")


class CreateModel(Body):
    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerConfig | None = None


class ModelBody(Body):
    model_id: str


class NumberedBody(ModelBody):
    seq_id: Number | None = None


class OptimStep(NumberedBody):
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(NumberedBody):
    path: str | None = None
    ttl_seconds: int | None = None


class SaveWeights(SaveBody):
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSampler(SaveBody):
    sampling_session_seq_id: Number | None = None
    user_metadata: Metadata | None = None
    overwrite: bool = False  # ours: the SDK has it for save_weights only


class SaveWeightsExternal(SaveBody):
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class CopyWeights(Body):
    source_path: str
    session_id: str | None = None
    model_seq_id: Number | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class SamplingSessionBody(Body):
    sampling_session_id: str


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False
    """Clients can be told the size of a result before they fetch it; this server sends the result."""
    model_id: str | None = None


class CompletionTarget(SamplingSessionBody):
    type: Literal["sampling_session"] = "sampling_session"
    cloned_sampler_id: Number = 0


class RetrieveFutures(Body):
    target: CompletionTarget
    prev_cursor: Number = 0
    timeout: float | None = Field(default=None, ge=0, strict=False)
    retrieved_request_ids: list[str] = []


class CancelFuture(Body):
    request_id: str


class WeightsInfo(Body):
    tinker_path: str


class SetTtl(Body):
    ttl_seconds: int | None


class ReverseKL(NumberedBody):
    reference_model_path: str
    data: list[Any]
    temperature: float = Field(default=1.0, gt=0, lt=math.inf)

    def call(self) -> ReverseKLCall:
        return reverse_kl_from_json(self.reference_model_path, self.data, self.temperature)


class Interpolate(Body):
    source_paths: list[str]
    coefficients: list[float]
    output_path: str | None = None
    output_checkpoint_type: Literal["sampler"] = "sampler"
