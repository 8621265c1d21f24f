"""MinT: reinforcement-learning fine-tuning of language models with LoRA, by a loop of your own.

The public surface. Names are fetched when first used, so `import mint` is quick and brings in no torch.
"""
# ruff: noqa: F401, F403 (imports for type checkers only)

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mint.version import __version__

if TYPE_CHECKING:
    import mint.errors as errors
    import mint.types as types
    from mint.client import APIFuture, RestClient, SamplingClient, ServiceClient, TrainingClient
    from mint.errors import *
    from mint.types import *

_HOMES = {
    "mint.client": "APIFuture RestClient SamplingClient ServiceClient TrainingClient",
    "mint.types": """
        AdamParams Checkpoint CheckpointType Datum EncodedTextChunk ForwardBackwardOutput LoraConfig ModelID ModelInput
        ModelInputChunk OptimStepResponse ParsedCheckpointTinkerPath SampledSequence SampleRequest SampleResponse
        SamplingParams StopReason TensorData TensorDtype TrainingRun
    """,
    # Our names first, then the Tinker SDK's for the same.
    "mint.errors": """
        BadRequest Busy ConnectionFailed Forbidden Internal MintError NotFound RequestFailed RequestRejected StatusError
        TimedOut Unauthorized
        APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError AuthenticationError
        BadRequestError BillingError ConflictError InternalServerError NotFoundError PermissionDeniedError
        RateLimitError RequestFailedError TinkerError UnprocessableEntityError
    """,
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
_MODULES = ("errors", "tinker", "types")

__all__ = ["__version__", *_MODULES, *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"mint.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'mint' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
