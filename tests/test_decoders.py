"""Whatever bytes arrive, a decoder reads them or says with `BadRequest` why not; nothing else, and what it reads it
writes back the same."""

import json
import math
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mint import wire
from mint.checks import check_data, check_sample
from mint.errors import BadRequest
from mint.mistakes import check_plausible
from mint.proto import MESSAGES
from mint.server.bodies import decompress
from mint.types import Datum, ModelInput, TensorData

FAST = settings(max_examples=60, suppress_health_check=list(HealthCheck))

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["encoded_text", "cross_entropy", "ppo", "int64", "float32", "stop", "\x00", "a" * 1000]),
)
names = st.sampled_from(
    [
        "model_id",
        "seq_id",
        "type",
        "forward_backward_input",
        "data",
        "loss_fn",
        "loss_fn_config",
        "model_input",
        "chunks",
        "tokens",
        "loss_fn_inputs",
        "target_tokens",
        "weights",
        "dtype",
        "shape",
        "prompt",
        "sampling_params",
        "num_samples",
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop",
        "sampling_session_id",
        "base_model",
        "model_path",
        "topk_prompt_logprobs",
        "target_prompt_logprobs",
        "learning_rate",
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=5)),
    max_leaves=20,
)


def read(decode: Any, given_: Any) -> Any:
    try:
        return decode(given_)
    except BadRequest as refusal:
        assert str(refusal)
        return None


def accepted(call: wire.ForwardBackwardCall) -> None:
    """Everything the server does with a request before the engine sees it."""
    read(lambda data: check_data(data, call.loss_fn, 264, 1024), call.data)
    read(lambda data: check_plausible(data, call.loss_fn, call.loss_fn_config), call.data)


@FAST
@given(st.binary(max_size=300))
def test_any_bytes_as_protobuf(body: bytes) -> None:
    if (call := read(wire.forward_backward_from_proto, body)) is not None:
        accepted(call)
    wire.sequence_of(body, protobuf=True)


@FAST
@given(st.data())
def test_any_well_formed_message_with_any_contents(data: st.DataObject) -> None:
    message = filled(MESSAGES["ForwardBackwardRequest"](), data, depth=5)
    if (call := read(wire.forward_backward_from_proto, message.SerializeToString())) is not None:
        accepted(call)


def filled(message: Any, data: st.DataObject, depth: int) -> Any:
    """Some of its fields set to anything their types allow."""
    for field in message.DESCRIPTOR.fields:
        if not data.draw(st.booleans()):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entries = getattr(message, field.name)
            value = field.message_type.fields_by_name["value"]
            for key in data.draw(st.lists(st.text(max_size=4), max_size=2)):
                if value.message_type is not None:
                    filled(entries[key], data, depth - 1)
                else:
                    entries[key] = data.draw(scalar_of(value))
        elif field.message_type is not None:
            if depth > 0:
                spot = getattr(message, field.name)
                repeated = hasattr(spot, "add")
                filled(spot.add() if repeated else spot, data, depth - 1)
        elif hasattr(getattr(message, field.name), "append"):
            getattr(message, field.name).extend(data.draw(st.lists(scalar_of(field), max_size=3)))
        else:
            setattr(message, field.name, data.draw(scalar_of(field)))
    return message


def scalar_of(field: Any) -> st.SearchStrategy[Any]:
    kinds: dict[int, st.SearchStrategy[Any]] = {
        field.CPPTYPE_STRING: st.binary(max_size=24) if field.type == field.TYPE_BYTES else st.text(max_size=8),
        field.CPPTYPE_BOOL: st.booleans(),
        field.CPPTYPE_FLOAT: st.floats(width=32),
        field.CPPTYPE_DOUBLE: st.floats(),
        field.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
        field.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
        field.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
        field.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
        field.CPPTYPE_ENUM: st.integers(0, 5),
    }
    return kinds[field.cpp_type]


@FAST
@given(values)
def test_any_json_as_any_request(value: Any) -> None:
    text = json.dumps(value).encode()
    body = read(wire.read_json, text)
    for field in ("forward_backward_input", "forward_input"):
        if (call := read(lambda v, f=field: wire.forward_backward_from_json(v, f), body)) is not None:
            accepted(call)
    if (asked := read(wire.sample_call_from_json, body)) is not None:
        read(lambda request: check_sample(request, 264, 1024), asked.request)
    read(wire.adam_params_from_json, body)
    wire.sequence_of(text, protobuf=False)


@FAST
@given(values, st.lists(st.integers(-5, 300), max_size=6), values)
def test_requests_that_are_nearly_right(odd: Any, tokens: list[int], other: Any) -> None:
    """Anything where one field ought to be something else."""
    datum = {
        "model_input": {"chunks": [{"tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": odd, "weights": other},
    }
    tensor = {"data": odd, "dtype": other, "shape": [len(tokens)]}
    for inputs in ({"target_tokens": odd, "weights": other}, {"target_tokens": tensor}, odd):
        body = {"model_id": "m", "forward_backward_input": {"data": [datum | {"loss_fn_inputs": inputs}]}}
        body["forward_backward_input"] |= {"loss_fn": "cross_entropy", "loss_fn_config": other}  # type: ignore[operator]
        if (call := read(lambda v: wire.forward_backward_from_json(v, "forward_backward_input"), body)) is not None:
            accepted(call)
    asked = {"prompt": {"chunks": [{"tokens": tokens}]}, "sampling_params": odd, "num_samples": other}
    if (call := read(wire.sample_call_from_json, asked)) is not None:
        read(lambda request: check_sample(request, 264, 1024), call.request)


@FAST
@given(st.binary(max_size=200), st.sampled_from(["zstd", "gzip", "identity", "deflate", ""]))
def test_any_bytes_as_a_packed_body(body: bytes, encoding: str) -> None:
    read(lambda packed: decompress(packed, encoding, 1000), body)


@FAST
@given(
    st.lists(st.integers(0, 263), min_size=1, max_size=8),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8),
    st.text(max_size=10).filter(lambda text: text.isprintable()),
    st.integers(1, 2**31 - 1),
)
def test_what_is_written_is_read_back(tokens: list[int], numbers: list[float], model: str, seq_id: int) -> None:
    inputs = {"target_tokens": TensorData(tokens, "int64"), "weights": TensorData(numbers, "float32")}
    call = wire.ForwardBackwardCall(model, seq_id, [Datum(ModelInput.from_ints(tokens), inputs)], "cross_entropy")
    again = wire.forward_backward_from_proto(wire.forward_backward_to_proto(call))
    assert (again.model_id, again.seq_id, again.loss_fn) == (model, seq_id, "cross_entropy")
    assert again.data[0].model_input.to_ints() == tokens
    found = again.data[0].loss_fn_inputs["weights"].data
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(found, numbers, strict=True))
