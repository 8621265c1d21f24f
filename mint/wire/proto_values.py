"""Messages, tensors and numbers in the protobuf of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from mint.errors import BadRequest
from mint.proto import MESSAGES
from mint.types import TensorData, TensorDtype, TopkRow

_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
DTYPE_NUMBERS: dict[str, int] = {"float32": 1, "int64": 2}
_BFLOAT16 = 4
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0  # how a top-k row shorter than k is filled up


def array_of(data: bytes, dtype: int) -> np.ndarray:
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


def tensor_to_proto(tensor: TensorData, message: Any) -> None:
    message.dense = np.ascontiguousarray(tensor.to_numpy()).tobytes()
    message.dtype = DTYPE_NUMBERS[tensor.dtype]
    message.shape.extend(tensor.shape)


def tensor_from_proto(message: Any) -> TensorData:
    sparse = message.WhichOneof("encoding") == "sparse_csr"
    values = array_of(message.sparse_csr.values if sparse else message.dense, message.dtype)
    dtype: TensorDtype = "float32" if values.dtype.kind == "f" else "int64"
    shape = list(message.shape) or None
    if not sparse:
        return TensorData(values, dtype, shape)
    crow, col = (array_of(b, 2) for b in (message.sparse_csr.crow_indices, message.sparse_csr.col_indices))
    return TensorData(values, dtype, shape, crow.tolist(), col.tolist())


def floats_of(values: Sequence[float | None]) -> bytes:
    return np.array([np.nan if v is None else v for v in values], dtype="<f4").tobytes()


def topk_to_proto(rows: Sequence[TopkRow | None], message: Any) -> None:
    k = max((len(row) for row in rows if row), default=0)
    ids = np.full((len(rows), k), _NO_TOKEN, dtype="<i4")
    logprobs = np.full((len(rows), k), _NO_LOGPROB, dtype="<f4")
    for n, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row or ()):
            ids[n, j], logprobs[n, j] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = k, len(rows)


def topk_from_proto(message: Any) -> list[TopkRow | None]:
    ids = np.frombuffer(message.token_ids, "<i4").reshape(message.length, message.k).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(message.length, message.k).tolist()
    rows = [[(i, p) for i, p in zip(*row, strict=True) if p > _NO_LOGPROB] for row in zip(ids, logprobs, strict=True)]
    return [row or None for row in rows]


def parse(name: str, body: bytes) -> Any:
    try:
        return MESSAGES[name].FromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is not a valid protobuf {name}: {error}") from error
