"""The JSON of the wire, in both directions; unknown fields are refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from mint.columns import compact
from mint.errors import BadRequest
from mint.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    PromptAltTokens,
    ReverseKLDatum,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from mint.wire.calls import ForwardBackwardCall, ReverseKLCall, SampleCall

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Any of `mint.types` as JSON-ready values; fields that are None are left out, times are ISO 8601. A metric that is
    no finite number is text ("nan"): clients insist on numbers, and read these as such."""
    match value:
        case ModelInput():
            return {"chunks": [{"type": "encoded_text", "tokens": list(map(int, c.tokens))} for c in value.chunks]}
        case TensorData():
            return {"data": value.data, "dtype": value.dtype, "shape": value.shape}
        case datetime():
            return value.isoformat()
        case ForwardBackwardOutput() | OptimStepResponse():
            plain = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != "metrics"}
            return plain | {"metrics": {k: v if math.isfinite(v) else str(v) for k, v in value.metrics.items()}}
        case Mapping():
            return {key: to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
        case float() if not math.isfinite(value):
            return None  # JSON has no such numbers
    if dataclasses.is_dataclass(value):
        return {f.name: to_json(v) for f in dataclasses.fields(value) if (v := getattr(value, f.name)) is not None}
    return value


_ADAPTERS: dict[type, Any] = {}


def from_json(cls: type[T], value: Any) -> T:
    """A plain dataclass of `mint.types` from JSON; unknown fields are ignored, for a newer server may send them."""
    if cls not in _ADAPTERS:
        from pydantic import TypeAdapter

        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls].validate_python(value)


def read_json(body: bytes) -> Any:
    try:
        value = json.loads(body)
        if b"\\u" in body:
            check_text(value)
        return value
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error


def check_text(value: Any) -> None:
    """JSON can spell half a character (\\ud800), which nothing can store or send on."""
    json.dumps(value, ensure_ascii=False).encode()


def fields_of(value: Any, what: str, known: Sequence[str], required: Sequence[str] = ()) -> dict[str, Any]:
    """`value` as a dict with the required fields and no unknown one; fields that are null count as left out."""
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be a JSON object, got {type(value).__name__}.")
    if unknown := sorted(set(value) - set(known)):
        raise BadRequest(f"{what} has unknown field {', '.join(map(repr, unknown))}; it may have {', '.join(known)}.")
    present = {key: item for key, item in value.items() if item is not None}
    if missing := [name for name in required if name not in present]:
        raise BadRequest(f"{what} lacks {', '.join(map(repr, missing))}.")
    return present


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The field called `name`, or the default where it was left out; of exactly this type, for true is no integer."""
    value = given.get(name, default)
    if value is not None and type(value) is not kind:
        raise BadRequest(f"{name} is {value!r:.100}; it must be {_KINDS[kind]}.")
    return value


_KINDS = {int: "an integer", str: "text", bool: "true or false"}


def model_input_from_json(value: Any) -> ModelInput:
    chunks = fields_of(value, "a model input", ["chunks"], ["chunks"])["chunks"]
    if not isinstance(chunks, list):
        raise BadRequest("a model input's chunks must be a list.")
    return ModelInput([_chunk_from_json(chunk) for chunk in chunks])


def _chunk_from_json(value: Any) -> EncodedTextChunk:
    kind = value.get("type", "encoded_text") if isinstance(value, dict) else None
    if kind != "encoded_text":
        raise BadRequest(f"a chunk of type {kind!r}: this server reads text only; send encoded_text chunks.")
    tokens = fields_of(value, "an encoded_text chunk", ["type", "tokens"], ["tokens"])["tokens"]
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise BadRequest("an encoded_text chunk's tokens must be a list of integers.")
    return EncodedTextChunk(tokens)


_TENSOR_FIELDS = ["data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"]


def tensor_from_json(value: Any) -> TensorData:
    given = fields_of(value, "a tensor", _TENSOR_FIELDS, ["data", "dtype"])
    try:
        return TensorData(**given)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"a tensor cannot be read: {error}") from error


def datum_from_json(value: Any) -> Datum:
    given = fields_of(value, "a datum", ["model_input", "loss_fn_inputs"], ["model_input"])
    inputs = given.get("loss_fn_inputs", {})
    if not isinstance(inputs, dict):
        raise BadRequest("a datum's loss_fn_inputs must be an object of tensors.")
    tensors = {key: tensor_from_json(t) for key, t in inputs.items()}
    return Datum(model_input_from_json(given["model_input"]), tensors)


def forward_backward_from_json(value: Any, input_field: str) -> ForwardBackwardCall:
    """The JSON body of /forward_backward or /forward (`input_field` forward_backward_input or forward_input)."""
    known = [input_field, "model_id", "seq_id", "type"]
    body = fields_of(value, "the request", known, [input_field, "model_id"])
    given = fields_of(body[input_field], input_field, ["data", "loss_fn", "loss_fn_config"], ["data", "loss_fn"])
    if not isinstance(given["data"], list):
        raise BadRequest(f"{input_field}.data must be a list of datums.")
    if not isinstance(given.get("loss_fn_config", {}), dict):
        raise BadRequest(f"{input_field}.loss_fn_config must be an object of options.")
    return ForwardBackwardCall(
        model_id=_typed(body, "model_id", str),
        seq_id=_typed(body, "seq_id", int),
        data=compact([datum_from_json(d) for d in given["data"]]),
        loss_fn=_typed(given, "loss_fn", str),
        loss_fn_config=dict(given.get("loss_fn_config", {})),
        forward_only=input_field == "forward_input",
    )


_REVERSE_KL_FIELDS = [f.name for f in dataclasses.fields(ReverseKLDatum)]


def reverse_kl_from_json(path: str, data: Sequence[Any], temperature: float) -> ReverseKLCall:
    read = []
    for index, value in enumerate(data):
        given = fields_of(value, f"datum {index}", _REVERSE_KL_FIELDS, _REVERSE_KL_FIELDS)
        student, reference = (model_input_from_json(given[name]) for name in ("student_input", "reference_input"))
        targets, weights = (tensor_from_json(given[name]) for name in ("target_tokens", "weights"))
        try:
            read.append(ReverseKLDatum(student, reference, targets, weights))
        except BadRequest as error:
            raise BadRequest(f"datum {index}: {error}") from error
    return ReverseKLCall(
        path, compact([one.student() for one in read]), compact([one.reference() for one in read]), temperature
    )


def _construct(cls: type[T], value: Any, what: str, extra: Sequence[str] = ()) -> T:
    """A parameter dataclass from JSON, its own checks included."""
    known = [f.name for f in dataclasses.fields(cls)] + list(extra)  # type: ignore[arg-type]
    try:
        return cls(**fields_of(value, what, known))
    except TypeError as error:
        raise BadRequest(f"{what} cannot be read: {error}") from error


def sampling_params_from_json(value: Any) -> SamplingParams:
    if isinstance(value, dict):
        for name in ("max_tokens", "seed", "top_k"):
            _typed(value, name, int)
    return _construct(SamplingParams, value, "sampling_params", ["stop_token_ids"])


def adam_params_from_json(value: Any) -> AdamParams:
    """Fields left out take the Tinker SDK's defaults, for it is its clients that leave them out."""
    sdk_defaults = {"learning_rate": 1e-4, "beta2": 0.95, "eps": 1e-12}
    given = fields_of(value, "adam_params", [f.name for f in dataclasses.fields(AdamParams)])
    return _construct(AdamParams, sdk_defaults | given, "adam_params")


_ASKED = {f.name: f.default for f in dataclasses.fields(SampleRequest)}
_ALWAYS_TOLD = ("prompt", "num_samples", "sampling_params")
_TINKERS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
_OURS = {f.name: f.default for f in dataclasses.fields(SamplingParams) if f.name not in _TINKERS}


def sample_request_to_json(request: SampleRequest) -> dict[str, Any]:
    """What differs from the defaults, so that servers which know fewer fields are not told of them."""
    params = to_json(request.sampling_params)
    for name, default in _OURS.items():
        if params.get(name) == default:
            params.pop(name, None)
    body = {"prompt": to_json(request.prompt), "num_samples": request.num_samples, "sampling_params": params}
    for name, default in _ASKED.items():
        if name not in _ALWAYS_TOLD and (value := getattr(request, name)) != default:
            body[name] = to_json(value)
    return body


_SAMPLE_ADDRESS = ["sampling_session_id", "seq_id", "base_model", "model_path", "type"]
_STABILITY = "record_stability_info"
_SAMPLE_FIELDS = [*_ASKED, *_SAMPLE_ADDRESS, _STABILITY]


def sample_call_from_json(value: Any) -> SampleCall:
    given = fields_of(value, "the request", _SAMPLE_FIELDS, ["prompt"])
    if _typed(given, _STABILITY, bool):
        raise BadRequest(f"{_STABILITY} serves only the loss stable_reinforce, which is not here; leave it out.")
    targets = given.get("target_prompt_logprobs")
    request = SampleRequest(
        prompt=model_input_from_json(given["prompt"]),
        sampling_params=sampling_params_from_json(given.get("sampling_params", {})),
        num_samples=_typed(given, "num_samples", int, 1),
        prompt_logprobs=_typed(given, "prompt_logprobs", bool, False),
        topk_prompt_logprobs=_typed(given, "topk_prompt_logprobs", int, 0),
        topk_sample_logprobs=_typed(given, "topk_sample_logprobs", int, 0),
        target_prompt_logprobs=None if targets is None else tensor_from_json(targets),
        prompt_alt_tokens_k=_typed(given, "prompt_alt_tokens_k", int, 0),
        prompt_logprobs_last_n=_typed(given, "prompt_logprobs_last_n", int),
    )
    session, base_model, path = (_typed(given, n, str) for n in ("sampling_session_id", "base_model", "model_path"))
    return SampleCall(request, session, _typed(given, "seq_id", int), base_model, path)


def sample_response_from_json(value: Mapping[str, Any]) -> SampleResponse:
    def rows(table: Any) -> list[Any] | None:
        return (
            None if table is None else [None if row is None else [(int(i), float(p)) for i, p in row] for row in table]
        )

    alternatives = value.get("prompt_alt_tokens")
    targets = value.get("target_prompt_logprobs")
    return SampleResponse(
        sequences=[
            SampledSequence(
                s["tokens"], s.get("logprobs"), s["stop_reason"], topk_logprobs=rows(s.get("topk_logprobs"))
            )
            for s in value["sequences"]
        ],
        prompt_logprobs=value.get("prompt_logprobs"),
        topk_prompt_logprobs=rows(value.get("topk_prompt_logprobs")),
        prompt_cache_hit_tokens=value.get("prompt_cache_hit_tokens", 0),
        target_prompt_logprobs=None if targets is None else tensor_from_json(targets),
        prompt_alt_tokens=alternatives
        and PromptAltTokens(tensor_from_json(alternatives["tokens"]), tensor_from_json(alternatives["logprobs"])),
    )


def forward_backward_output_from_json(value: Mapping[str, Any]) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(
        loss_fn_outputs=[{k: tensor_from_json(t) for k, t in output.items()} for output in value["loss_fn_outputs"]],
        metrics={name: float(metric) for name, metric in value["metrics"].items()},
        loss_fn_output_type=value["loss_fn_output_type"],
    )
