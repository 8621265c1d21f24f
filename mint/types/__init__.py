"""The vocabulary of MinT: the values that cross from one room to another.

Plain dataclasses over numpy, used alike by client, wire, server and engine. Names and fields are those of the Tinker
SDK, so `import mint as tinker` works; where the SDK drops or renames silently, these refuse by name. One file a noun,
all imported from here. Encoding lives in `mint.wire`, checks that need a model's facts in `mint.checks`.
"""

from mint.types.datum import LOSS_INPUT_DTYPES, Datum, ReverseKLDatum
from mint.types.model_input import EncodedTextChunk, ModelInput, ModelInputChunk
from mint.types.params import LARGE_RATE, MAX_RANK, AdamParams, LoraConfig, SamplingParams
from mint.types.runs import (
    CHECKPOINT_KINDS,
    Checkpoint,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    CheckpointType,
    Cursor,
    ParsedCheckpointTinkerPath,
    TrainingRun,
    TrainingRunsResponse,
)
from mint.types.sampling import PromptAltTokens, SampledSequence, SampleRequest, SampleResponse, StopReason, TopkRow
from mint.types.service import (
    GetInfoResponse,
    GetSamplerResponse,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    ListSessionsResponse,
    ModelData,
    ModelID,
    SupportedModel,
    Usage,
    UsageResponse,
    WeightsInfoResponse,
)
from mint.types.tensors import TensorData, TensorDtype
from mint.types.training import (
    ForwardBackwardOutput,
    LoadWeightsResponse,
    LossFnConfig,
    LossFnType,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

__all__ = [
    "CHECKPOINT_KINDS",
    "LARGE_RATE",
    "LOSS_INPUT_DTYPES",
    "MAX_RANK",
    "AdamParams",
    "Checkpoint",
    "CheckpointArchiveUrlResponse",
    "CheckpointType",
    "CheckpointsListResponse",
    "Cursor",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetSamplerResponse",
    "GetServerCapabilitiesResponse",
    "GetSessionResponse",
    "ListSessionsResponse",
    "LoadWeightsResponse",
    "LoraConfig",
    "LossFnConfig",
    "LossFnType",
    "ModelData",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PromptAltTokens",
    "ReverseKLDatum",
    "SampleRequest",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "StopReason",
    "SupportedModel",
    "TensorData",
    "TensorDtype",
    "TopkRow",
    "TrainingRun",
    "TrainingRunsResponse",
    "Usage",
    "UsageResponse",
    "WeightsInfoResponse",
]
