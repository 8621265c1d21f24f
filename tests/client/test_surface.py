"""What `import mint` offers, and what it costs."""

import inspect
import subprocess
import sys

import pytest

import mint
from mint import errors, tinker, types

# Names a script written for the Tinker SDK may use at top level.
SDK_NAMES = """
    TrainingClient ServiceClient SamplingClient RestClient APIFuture AdamParams Checkpoint CheckpointType Datum
    EncodedTextChunk ForwardBackwardOutput LoraConfig ModelID ModelInput ModelInputChunk OptimStepResponse
    ParsedCheckpointTinkerPath SampledSequence SampleRequest SampleResponse SamplingParams StopReason TensorData
    TensorDtype TrainingRun TinkerError APIError APIStatusError APITimeoutError APIConnectionError
    APIResponseValidationError RequestFailedError BadRequestError AuthenticationError BillingError PermissionDeniedError
    NotFoundError ConflictError UnprocessableEntityError RateLimitError InternalServerError types __version__
""".split()  # noqa: SIM905

CLIENTS = (mint.ServiceClient, mint.TrainingClient, mint.SamplingClient, mint.RestClient)


@pytest.mark.parametrize("name", SDK_NAMES)
def test_t1_to_t12_scripts_find_the_sdks_names_under_mint_and_under_mint_tinker(name: str) -> None:
    assert name in dir(mint)
    assert getattr(mint, name) is not None
    assert getattr(tinker, name) is not None


def test_importing_mint_brings_in_nothing_heavy_and_touches_no_network() -> None:
    code = """
import sys, mint
assert not {"torch", "transformers", "fastapi", "ray", "numpy", "httpx"} & set(sys.modules)
mint.ServiceClient, mint.types, mint.tinker
import mint as tinker
from mint import types
from mint.tinker.types import AdamParams
assert tinker.types is types
assert not {"torch", "transformers", "fastapi", "ray"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="DoesNotExist"):
        _ = mint.DoesNotExist


def test_no_client_method_swallows_unknown_arguments() -> None:
    for client in CLIENTS:
        for name, method in inspect.getmembers(client, inspect.isfunction):
            if name.startswith("_") and name != "__init__":
                continue
            kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
            assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name


def test_every_call_that_waits_has_an_async_twin_with_the_same_arguments() -> None:
    plain = {"close", "create_rest_client"}
    for client in CLIENTS:
        methods = {n: m for n, m in inspect.getmembers(client, inspect.isfunction) if not n.startswith("_")}
        for name, method in methods.items():
            if name.endswith("_async") or name in plain:
                continue
            twin = methods[f"{name}_async"]
            assert inspect.iscoroutinefunction(twin)
            assert list(inspect.signature(twin).parameters) == list(inspect.signature(method).parameters), name


def test_sdk_style_except_clauses_catch_what_they_name() -> None:
    assert issubclass(mint.BadRequest, mint.APIStatusError)
    assert not issubclass(mint.ConnectionFailed, mint.APIStatusError)
    assert issubclass(mint.APITimeoutError, mint.APIConnectionError)
    assert issubclass(mint.RequestRejected, mint.RequestFailedError)
    assert issubclass(mint.RequestRejected, mint.BadRequestError)
    assert mint.RateLimitError("x").status_code == 429
    for name in errors.__dict__:
        if isinstance(getattr(errors, name), type):
            assert issubclass(getattr(errors, name), mint.TinkerError)


def test_the_tinker_types_are_the_mint_types_but_for_their_defaults() -> None:
    assert tinker.types.Datum is types.Datum
    assert {n for n, v in vars(tinker.types).items() if getattr(types, n, None) is not v and not n.startswith("_")} == {
        "AdamParams",
        "LoraConfig",
    }
