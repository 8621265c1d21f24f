"""Training requests in protobuf, in both directions; unknown fields are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from mint.columns import Columns, compact
from mint.errors import BadRequest
from mint.proto import MESSAGES
from mint.types import Datum, EncodedTextChunk, ModelInput
from mint.wire.calls import ForwardBackwardCall
from mint.wire.proto_values import DTYPE_NUMBERS, array_of, parse, tensor_from_proto, tensor_to_proto

_MOST_TOKEN = 2**31 - 1


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
                tensor_to_proto(tensor, row.loss_fn_inputs[key])
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
        (key, column.tobytes(), column.itemsize, DTYPE_NUMBERS[column.dtype.name])
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


def _refuse_unknown(message: Any, body: bytes) -> None:
    """Fields of a newer protocol, which would otherwise be dropped without a word."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        where, number = next(_unknown_fields(parse(message.DESCRIPTOR.name, body)))
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
    message = parse("ForwardBackwardRequest", body)
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
        array_of(b"".join(tokens), 3),
        {key: array_of(b"".join(parts), dtypes[key]) for key, parts in columns.items()},
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
        chunks.append(EncodedTextChunk(array_of(chunk.encoded_text.tokens, 3).tolist()))
    return Datum(ModelInput(chunks), {key: tensor_from_proto(t) for key, t in message.loss_fn_inputs.items()})
