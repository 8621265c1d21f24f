"""Results in protobuf, in both directions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mint.proto import MESSAGES
from mint.types import (
    ForwardBackwardOutput,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    StopReason,
    TensorData,
    TensorDtype,
)
from mint.wire.proto_values import (
    DTYPE_NUMBERS,
    array_of,
    floats_of,
    parse,
    tensor_from_proto,
    tensor_to_proto,
    topk_from_proto,
    topk_to_proto,
)

_STOP_REASONS: tuple[StopReason, ...] = ("stop", "length")


def forward_backward_output_to_proto(output: ForwardBackwardOutput) -> bytes:
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)
    for run in _runs_of_one_layout(output.loss_fn_outputs):
        record = message.loss_fn_outputs.add(type_tag=output.loss_fn_output_type, num_datums=len(run))
        for key in run[0]:
            arrays = [np.ascontiguousarray(datum[key].to_numpy()) for datum in run]
            batched = record.fields[key]
            batched.data = b"".join(array.tobytes() for array in arrays)
            batched.offsets = np.cumsum([0] + [array.nbytes for array in arrays], dtype="<i8").tobytes()
            batched.dtype = DTYPE_NUMBERS[run[0][key].dtype]
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
    message = parse("ForwardBackwardOutput", body)
    outputs: list[dict[str, TensorData]] = []
    for record in message.loss_fn_outputs:
        datums: list[dict[str, TensorData]] = [{} for _ in range(record.num_datums)]
        for key, batched in record.fields.items():
            offsets = np.frombuffer(batched.offsets, "<i8")
            trailing = list(batched.trailing_shape)
            for n, datum in enumerate(datums):
                values = array_of(batched.data[offsets[n] : offsets[n + 1]], batched.dtype)
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
            row.logprobs = floats_of(sequence.logprobs)
        if sequence.topk_logprobs is not None:
            topk_to_proto(sequence.topk_logprobs, row.topk_sampled_logprobs)
    if response.prompt_logprobs is not None:
        message.prompt_logprobs = floats_of(response.prompt_logprobs)
    if response.topk_prompt_logprobs is not None:
        topk_to_proto(response.topk_prompt_logprobs, message.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        tensor_to_proto(response.target_prompt_logprobs, message.target_prompt_logprobs)
    if response.prompt_alt_tokens is not None:
        tensor_to_proto(response.prompt_alt_tokens.tokens, message.prompt_alt_tokens.tokens)
        tensor_to_proto(response.prompt_alt_tokens.logprobs, message.prompt_alt_tokens.logprobs)
    return message.SerializeToString()


def _sequence_from_proto(message: Any) -> SampledSequence:
    topk = None
    if message.HasField("topk_sampled_logprobs"):
        topk = [row or [] for row in topk_from_proto(message.topk_sampled_logprobs)]
    return SampledSequence(
        tokens=np.frombuffer(message.tokens, "<i4").tolist(),
        logprobs=np.frombuffer(message.logprobs, "<f4").tolist() if message.HasField("logprobs") else None,
        stop_reason=_STOP_REASONS[message.stop_reason],
        topk_logprobs=topk,
    )


def sample_response_from_proto(body: bytes) -> SampleResponse:
    message = parse("SampleResponse", body)
    prompt_logprobs: list[float | None] | None = None
    if message.HasField("prompt_logprobs"):
        values = np.frombuffer(message.prompt_logprobs, "<f4").tolist()
        prompt_logprobs = [None if math.isnan(v) else v for v in values]
    topk = topk_from_proto(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else None
    targets = tensor_from_proto(message.target_prompt_logprobs) if message.HasField("target_prompt_logprobs") else None
    alternatives = None
    if message.HasField("prompt_alt_tokens"):
        alternatives = PromptAltTokens(
            tensor_from_proto(message.prompt_alt_tokens.tokens), tensor_from_proto(message.prompt_alt_tokens.logprobs)
        )
    return SampleResponse(
        sequences=[_sequence_from_proto(s) for s in message.sequences],
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk,
        prompt_cache_hit_tokens=message.prompt_cache_hit_tokens,
        target_prompt_logprobs=targets,
        prompt_alt_tokens=alternatives,
    )
