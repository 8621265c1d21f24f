"""The place of a request that could not be read as a whole."""

from __future__ import annotations

from mint.errors import BadRequest
from mint.wire.json_bodies import read_json
from mint.wire.proto_values import parse


def sequence_of(body: bytes, protobuf: bool) -> tuple[str, int] | None:
    """Model and sequence number of a training request that could not be read as a whole."""
    try:
        value = parse("ForwardBackwardRequest", body) if protobuf else read_json(body)
    except BadRequest:
        return None
    if protobuf:
        return value.model_id, value.seq_id
    given = value if isinstance(value, dict) else {}
    model_id, seq_id = given.get("model_id"), given.get("seq_id")
    return (model_id, seq_id) if isinstance(model_id, str) and type(seq_id) is int else None
