"""Types to and from bytes: the JSON and the protobuf of the Tinker wire, in both directions.

Client and server both use this module, and nobody else knows the encoding. Whatever arrives is checked here for shape
only (unknown fields are refused by name); what needs a model's facts is checked by who has them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from mint.columns import Columns, compact
from mint.errors import BadRequest
from mint.proto import MESSAGES
from mint.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    StopReason,
    TensorData,
    TensorDtype,
    TopkRow,
)

PROTOBUF = "application/x-protobuf"
HOLD, HELD = "x-mint-hold", "x-mint-held"
"""MinT's own headers: a request sent with the first is answered by its result, with its id in the second. A sample's
answer begins when the result is there; a training request's as soon as the request is safe, and its body is `LATER`."""
JSON = "application/json"
LATER = "application/x-mint-later"
"""A body that comes when the result is there: its media type, a line break and the result, or nothing if it took too
long and has to be polled for."""
FRAMES = "application/x-mint-frames"
"""Several bodies in one, each with its length in front of it."""

T = TypeVar("T")


def framed(bodies: Iterable[bytes]) -> bytes:
    return b"".join(part for body in bodies for part in (len(body).to_bytes(4, "big"), body))


class FrameReader:
    """The bodies of a stream of frames, as they become whole; at most so many at a time."""

    def __init__(self, most: int | None = None) -> None:
        self._rest = b""
        self._most = most

    def feed(self, data: bytes) -> list[bytes]:
        data, start = self._rest + data, 0
        bodies: list[bytes] = []
        while len(data) - start >= 4 and len(data) >= (
            end := start + 4 + int.from_bytes(data[start : start + 4], "big")
        ):
            if len(bodies) == self._most:
                raise BadRequest(f"the body has more than {self._most} frames; send fewer at a time.")
            bodies.append(data[start + 4 : end])
            start = end
        self._rest = data[start:]
        return bodies

    @property
    def whole(self) -> bool:
        return not self._rest


def read_frames(data: bytes, most: int | None = None) -> list[bytes]:
    reader = FrameReader(most)
    bodies = reader.feed(data)
    if not reader.whole:
        raise BadRequest("the body's last frame ends before the length that stands in front of it.")
    return bodies


@dataclass(frozen=True)
class ForwardBackwardCall:
    """One forward or forward_backward request."""

    model_id: str
    seq_id: int | None
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True)
class SampleCall:
    """One sample request and whom it asks: a sampling session, or a base model or checkpoint by name."""

    request: SampleRequest
    sampling_session_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None
    model_path: str | None = None


def sequence_of(body: bytes, protobuf: bool) -> tuple[str, int] | None:
    """Model and sequence number of a training request that could not be read as a whole."""
    try:
        value = _parse("ForwardBackwardRequest", body) if protobuf else read_json(body)
    except BadRequest:
        return None
    if protobuf:
        return value.model_id, value.seq_id
    given = value if isinstance(value, dict) else {}
    model_id, seq_id = given.get("model_id"), given.get("seq_id")
    return (model_id, seq_id) if isinstance(model_id, str) and type(seq_id) is int else None


# --------------------------------------------------------------------------------------------------------------------
# JSON


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


def sample_request_to_json(request: SampleRequest) -> dict[str, Any]:
    """What differs from the defaults, so that servers which know fewer fields are not told of them."""
    params = to_json(request.sampling_params)
    if params["min_p"] == 0:
        del params["min_p"]
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


# --------------------------------------------------------------------------------------------------------------------
# Protobuf: values

_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
_DTYPE_NUMBERS: dict[str, int] = {"float32": 1, "int64": 2}
_BFLOAT16 = 4
_MOST_TOKEN = 2**31 - 1
_STOP_REASONS: tuple[StopReason, ...] = ("stop", "length")
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0  # how a top-k row shorter than k is filled up


def _array(data: bytes, dtype: int) -> np.ndarray:
    """Little-endian bytes as float32 or int64, the two types the vocabulary has."""
    if dtype == _BFLOAT16:
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in _DTYPES:
        raise BadRequest(
            f"a tensor has dtype number {dtype}; expected float32 (1), int64 (2), int32 (3) or bfloat16 (4)."
        )
    kind = _DTYPES[dtype]
    if len(data) % kind.itemsize:
        raise BadRequest(f"a tensor of {kind.name} has {len(data)} bytes, not a multiple of {kind.itemsize}.")
    array = np.frombuffer(data, kind)
    return array.astype(np.int64) if kind.itemsize == 4 and kind.kind == "i" else array


def _tensor_to_proto(tensor: TensorData, message: Any) -> None:
    message.dense = np.ascontiguousarray(tensor.to_numpy()).tobytes()
    message.dtype = _DTYPE_NUMBERS[tensor.dtype]
    message.shape.extend(tensor.shape)


def _tensor_from_proto(message: Any) -> TensorData:
    sparse = message.WhichOneof("encoding") == "sparse_csr"
    values = _array(message.sparse_csr.values if sparse else message.dense, message.dtype)
    dtype: TensorDtype = "float32" if values.dtype.kind == "f" else "int64"
    shape = list(message.shape) or None
    if not sparse:
        return TensorData(values, dtype, shape)
    crow, col = (_array(b, 2) for b in (message.sparse_csr.crow_indices, message.sparse_csr.col_indices))
    return TensorData(values, dtype, shape, crow.tolist(), col.tolist())


def _floats(values: Sequence[float | None]) -> bytes:
    return np.array([np.nan if v is None else v for v in values], dtype="<f4").tobytes()


def _topk_to_proto(rows: Sequence[TopkRow | None], message: Any) -> None:
    k = max((len(row) for row in rows if row), default=0)
    ids = np.full((len(rows), k), _NO_TOKEN, dtype="<i4")
    logprobs = np.full((len(rows), k), _NO_LOGPROB, dtype="<f4")
    for n, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row or ()):
            ids[n, j], logprobs[n, j] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = k, len(rows)


def _topk_from_proto(message: Any) -> list[TopkRow | None]:
    ids = np.frombuffer(message.token_ids, "<i4").reshape(message.length, message.k).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(message.length, message.k).tolist()
    rows = [[(i, p) for i, p in zip(*row, strict=True) if p > _NO_LOGPROB] for row in zip(ids, logprobs, strict=True)]
    return [row or None for row in rows]


# --------------------------------------------------------------------------------------------------------------------
# Protobuf: requests


def forward_backward_to_proto(call: ForwardBackwardCall) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](
        model_id=call.model_id, seq_id=call.seq_id, loss_fn=call.loss_fn, forward_only=call.forward_only
    )
    if isinstance(call.data, Columns) and call.data.tokens.max() <= _MOST_TOKEN:
        _columns_to_proto(call.data, message)
    else:
        for datum in call.data:
            row = message.data.add()
            for chunk in datum.model_input.chunks:
                row.model_input.add().encoded_text.tokens = np.asarray(chunk.tokens, dtype="<i4").tobytes()
            for key, tensor in datum.loss_fn_inputs.items():
                _tensor_to_proto(tensor, row.loss_fn_inputs[key])
    for key, value in call.loss_fn_config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[key].text = value
        else:
            message.loss_fn_config_v2[key].number = value
            message.loss_fn_config[key] = value  # for servers that read the older field
    return message.SerializeToString()


def _columns_to_proto(data: Columns, message: Any) -> None:
    tokens = data.tokens.astype("<i4").tobytes()
    columns = [
        (key, column.tobytes(), column.itemsize, _DTYPE_NUMBERS[column.dtype.name])
        for key, column in data.inputs.items()
    ]
    for start, length in zip(data.starts.tolist(), data.lengths.tolist(), strict=True):
        row = message.data.add()
        row.model_input.add().encoded_text.tokens = tokens[4 * start : 4 * (start + length)]
        for key, column, size, dtype in columns:
            tensor = row.loss_fn_inputs[key]
            tensor.dense = column[size * start : size * (start + length)]
            tensor.dtype = dtype
            tensor.shape.append(length)


def _parse(name: str, body: bytes) -> Any:
    try:
        return MESSAGES[name].FromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is not a valid protobuf {name}: {error}") from error


def _refuse_unknown(message: Any, body: bytes) -> None:
    """Fields of a newer protocol, which would otherwise be dropped without a word."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        where, number = next(_unknown_fields(_parse(message.DESCRIPTOR.name, body)))
        known = ", ".join(f"{f.number} {f.name}" for f in where.DESCRIPTOR.fields)
        raise BadRequest(
            f"{where.DESCRIPTOR.name} has unknown field number {number}; this server knows {known}. The client may be "
            "newer than the server."
        )


def _unknown_fields(message: Any) -> Iterator[tuple[Any, int]]:
    yield from ((message, unknown.field_number) for unknown in UnknownFieldSet(message))
    for known, value in message.ListFields():
        if known.message_type is None:
            continue
        if isinstance(value, Message):
            parts = [value]
        else:
            parts = list(value.values() if hasattr(value, "values") else value)  # a map, or a list
        for part in parts:
            if isinstance(part, Message):
                yield from _unknown_fields(part)


def forward_backward_from_proto(body: bytes) -> ForwardBackwardCall:
    message = _parse("ForwardBackwardRequest", body)
    _refuse_unknown(message, body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return ForwardBackwardCall(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=_columns_from_proto(message) or compact([_datum_from_proto(datum) for datum in message.data]),
        loss_fn=message.loss_fn,
        loss_fn_config=config,
        forward_only=message.forward_only,
    )


def _columns_from_proto(message: Any) -> Columns | None:
    """The usual batch, without an object for every tensor; None for another, or one with a fault."""
    keys = sorted(message.data[0].loss_fn_inputs) if message.data else []
    tokens: list[bytes] = []
    columns: dict[str, list[bytes]] = {key: [] for key in keys}
    dtypes = {key: message.data[0].loss_fn_inputs[key].dtype for key in keys}
    if not dtypes.keys() or any(dtype not in (1, 2) for dtype in dtypes.values()):
        return None
    for datum in message.data:
        runs, inputs = [chunk.encoded_text.tokens for chunk in datum.model_input], datum.loss_fn_inputs
        if not runs or any(not run or len(run) % 4 for run in runs):  # chunks of another kind have no tokens
            return None
        if len(inputs) != len(keys) or datum.model_input_spans or datum.loss_fn_input_spans:
            return None
        run = b"".join(runs)
        tokens.append(run)
        for key in keys:
            if key not in inputs:
                return None
            tensor = inputs[key]
            data, shape = tensor.dense, tensor.shape
            if tensor.dtype != dtypes[key] or len(data) != len(run) * (1 if dtypes[key] == 1 else 2):
                return None
            if len(shape) > 1 or (shape and 4 * shape[0] != len(run)):
                return None
            columns[key].append(data)
    return Columns(
        np.array([len(run) // 4 for run in tokens]),
        _array(b"".join(tokens), 3),
        {key: _array(b"".join(parts), dtypes[key]) for key, parts in columns.items()},
    )


def _datum_from_proto(message: Any) -> Datum:
    if message.model_input_spans or message.loss_fn_input_spans:
        raise BadRequest(
            "provenance spans serve only the loss stable_reinforce, which this server does not have; drop them."
        )
    chunks = []
    for chunk in message.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise BadRequest(f"a chunk of type {kind!r}: this server reads text only; send encoded_text chunks.")
        chunks.append(EncodedTextChunk(_array(chunk.encoded_text.tokens, 3).tolist()))
    return Datum(ModelInput(chunks), {key: _tensor_from_proto(t) for key, t in message.loss_fn_inputs.items()})


# --------------------------------------------------------------------------------------------------------------------
# Protobuf: results


def forward_backward_output_to_proto(output: ForwardBackwardOutput) -> bytes:
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    for run in _runs_of_one_layout(output.loss_fn_outputs):
        record = message.loss_fn_outputs.add(type_tag=output.loss_fn_output_type, num_datums=len(run))
        for key in run[0]:
            arrays = [np.ascontiguousarray(datum[key].to_numpy()) for datum in run]
            batched = record.fields[key]
            batched.data = b"".join(array.tobytes() for array in arrays)
            batched.offsets = np.cumsum([0] + [array.nbytes for array in arrays], dtype="<i8").tobytes()
            batched.dtype = _DTYPE_NUMBERS[run[0][key].dtype]
            batched.trailing_shape.extend(arrays[0].shape[1:])
    return message.SerializeToString()


def _runs_of_one_layout(outputs: Sequence[dict[str, TensorData]]) -> list[list[dict[str, TensorData]]]:
    """Consecutive datums whose fields share dtype and trailing shape: what one ArrayRecord can hold."""
    runs: list[list[dict[str, TensorData]]] = []
    previous = None
    for output in outputs:
        layout = {key: (tensor.dtype, tensor.shape[1:]) for key, tensor in output.items()}
        if layout != previous:
            runs.append([])
            previous = layout
        runs[-1].append(output)
    return runs


def forward_backward_output_from_proto(body: bytes) -> ForwardBackwardOutput:
    message = _parse("ForwardBackwardOutput", body)
    outputs: list[dict[str, TensorData]] = []
    for record in message.loss_fn_outputs:
        datums: list[dict[str, TensorData]] = [{} for _ in range(record.num_datums)]
        for key, batched in record.fields.items():
            offsets = np.frombuffer(batched.offsets, "<i8")
            trailing = list(batched.trailing_shape)
            for n, datum in enumerate(datums):
                values = _array(batched.data[offsets[n] : offsets[n + 1]], batched.dtype)
                dtype: TensorDtype = "float32" if values.dtype.kind == "f" else "int64"
                datum[key] = TensorData(values.reshape(-1, *trailing), dtype)
        outputs += datums
    return ForwardBackwardOutput(outputs, dict(message.metrics), message.loss_fn_output_type.rpartition(":")[2])


def sample_response_to_proto(response: SampleResponse) -> bytes:
    message = MESSAGES["SampleResponse"](prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        row = message.sequences.add(
            stop_reason=_STOP_REASONS.index(sequence.stop_reason), tokens=np.asarray(sequence.tokens, "<i4").tobytes()
        )
        if sequence.logprobs is not None:
            row.logprobs = _floats(sequence.logprobs)
        if sequence.topk_logprobs is not None:
            _topk_to_proto(sequence.topk_logprobs, row.topk_sampled_logprobs)
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = _floats(response.prompt_logprobs)
    if response.topk_prompt_logprobs is not None:
        _topk_to_proto(response.topk_prompt_logprobs, message.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        _tensor_to_proto(response.target_prompt_logprobs, message.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        _tensor_to_proto(response.prompt_alt_tokens.tokens, message.prompt_alt_tokens.tokens)
        _tensor_to_proto(response.prompt_alt_tokens.logprobs, message.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def _sequence_from_proto(message: Any) -> SampledSequence:
    topk = None
    if message.HasField("topk_sampled_logprobs"):
        topk = [row or [] for row in _topk_from_proto(message.topk_sampled_logprobs)]
    return SampledSequence(
        tokens=np.frombuffer(message.tokens, "<i4").tolist(),
        logprobs=np.frombuffer(message.logprobs, "<f4").tolist() if message.HasField("logprobs") else None,
        stop_reason=_STOP_REASONS[message.stop_reason],
        topk_logprobs=topk,
    )


def sample_response_from_proto(body: bytes) -> SampleResponse:
    message = _parse("SampleResponse", body)
    prompt_logprobs: list[float | None] | None = None
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, "<f4").tolist()
        prompt_logprobs = [None if math.isnan(v) else v for v in values]
    topk = _topk_from_proto(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None
    targets = _tensor_from_proto(message.target_prompt_logprobs) if message.HasField("target_prompt_logprobs") else None
    alternatives = None
    if message.HasField("prompt_alt_tokens"):
        alternatives = PromptAltTokens(
            _tensor_from_proto(message.prompt_alt_tokens.tokens), _tensor_from_proto(message.prompt_alt_tokens.logprobs)
        )
    return SampleResponse(
        sequences=[_sequence_from_proto(s) for s in message.sequences],
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        target_prompt_logprobs=targets,
        prompt_alt_tokens=alternatives,
    )
