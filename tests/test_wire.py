"""The wire: what is written is read back the same, and the bytes are those of the protocol."""

import dataclasses
import json
import math
import struct
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mint
from mint import types, wire
from mint.proto import MESSAGES

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def datums(draw: st.DrawFn) -> types.Datum:
    chunks = draw(st.lists(TOKENS, min_size=1, max_size=2))
    length = sum(map(len, chunks))
    width = draw(st.sampled_from([(), (3,)]))
    size = length * math.prod(width)
    return types.Datum(
        types.ModelInput([types.EncodedTextChunk(chunk) for chunk in chunks]),
        {
            "target_tokens": np.array(draw(st.lists(st.integers(-1, 2**40), min_size=size, max_size=size))).reshape(
                length, *width
            ),
            "weights": np.array(draw(st.lists(FLOATS, min_size=size, max_size=size)), np.float32).reshape(
                length, *width
            ),
        },
    )


@st.composite
def calls(draw: st.DrawFn) -> wire.ForwardBackwardCall:
    return wire.ForwardBackwardCall(
        model_id=draw(st.text(max_size=8)),
        seq_id=draw(st.integers(0, 2**31 - 1)),
        data=draw(st.lists(datums(), max_size=3)),
        loss_fn=draw(st.sampled_from(["cross_entropy", "ppo"])),
        loss_fn_config=draw(st.dictionaries(st.text(min_size=1, max_size=5), FLOATS | st.text(max_size=5), max_size=3)),
        forward_only=draw(st.booleans()),
    )


def in_one_chunk(call: wire.ForwardBackwardCall) -> wire.ForwardBackwardCall:
    """How an input's tokens are divided into chunks means nothing, and need not survive."""
    data = [types.Datum(types.ModelInput.from_ints(d.model_input.to_ints()), d.loss_fn_inputs) for d in call.data]
    return dataclasses.replace(call, data=data)


@given(calls())
@settings(max_examples=50)
def test_a_request_survives_protobuf(call: wire.ForwardBackwardCall) -> None:
    assert in_one_chunk(wire.forward_backward_from_proto(wire.forward_backward_to_proto(call))) == in_one_chunk(call)


@given(calls())
@settings(max_examples=50)
def test_a_request_survives_json(call: wire.ForwardBackwardCall) -> None:
    field = "forward_input" if call.forward_only else "forward_backward_input"
    given = {"data": call.data, "loss_fn": call.loss_fn, "loss_fn_config": call.loss_fn_config}
    body = json.dumps({"model_id": call.model_id, "seq_id": call.seq_id, field: wire.to_json(given)})
    assert in_one_chunk(wire.forward_backward_from_json(wire.read_json(body.encode()), field)) == in_one_chunk(call)


TOPK = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-90, 0, width=32)), min_size=1, max_size=3)


@st.composite
def responses(draw: st.DrawFn) -> types.SampleResponse:
    def sequence() -> types.SampledSequence:
        tokens = draw(TOKENS)
        size = {"min_size": len(tokens), "max_size": len(tokens)}
        return types.SampledSequence(
            tokens,
            draw(st.none() | st.lists(st.floats(-90, 0, width=32), **size)),
            draw(st.sampled_from(["stop", "length"])),
            topk_logprobs=draw(st.none() | st.lists(TOPK, **size)),
        )

    table = types.TensorData([[1, 2], [3, 4]], "int64")
    scores = types.TensorData([[-1.0, -2.0], [0.0, -4.0]], "float32")
    return types.SampleResponse(
        sequences=[sequence() for _ in range(draw(st.integers(0, 2)))],
        prompt_logprobs=draw(st.none() | st.lists(st.none() | st.floats(-90, 0, width=32), max_size=4)),
        topk_prompt_logprobs=draw(st.none() | st.lists(st.none() | TOPK, min_size=1, max_size=3)),
        prompt_cache_hit_tokens=draw(st.integers(0, 100)),
        target_prompt_logprobs=draw(st.sampled_from([None, scores])),
        prompt_alt_tokens=draw(st.sampled_from([None, types.PromptAltTokens(table, scores)])),
    )


@given(responses())
@settings(max_examples=50)
def test_a_sample_survives_protobuf_and_json(response: types.SampleResponse) -> None:
    assert wire.sample_response_from_proto(wire.sample_response_to_proto(response)) == response
    assert wire.sample_response_from_json(wire.to_json(response)) == response


def test_outputs_of_changing_shape_survive_protobuf_and_json_in_order() -> None:
    rows = [[-1.0, -2.0], [-3.0], [[-1.0, -2.0], [-3.0, -4.0]], [[-5.0, -6.0]], [-7.0]]
    output = types.ForwardBackwardOutput([{"logprobs": types.TensorData.of(row)} for row in rows], {"loss:sum": 1.5})
    for back in (
        wire.forward_backward_output_from_proto(wire.forward_backward_output_to_proto(output)),
        wire.forward_backward_output_from_json(wire.to_json(output)),
    ):
        assert [o["logprobs"].tolist() for o in back.loss_fn_outputs] == rows
        assert back.metrics == {"loss:sum": 1.5}


# --------------------------------------------------------------------------------------------------------------------
# Golden bytes: written out by hand from the field numbers of the protocol, tag = number << 3 | wire type


def _bytes_field(number: int, payload: bytes) -> bytes:
    return bytes([number << 3 | 2, len(payload)]) + payload


def test_the_bytes_of_a_request_are_those_of_the_protocol() -> None:
    call = wire.ForwardBackwardCall(
        "m",
        3,
        [types.Datum(types.ModelInput.from_ints([7, 258]), {"weights": [0.5, -1.0]})],
        "ppo",
        {"beta": 0.25},
        True,
    )
    tokens = _bytes_field(1, _bytes_field(1, _bytes_field(1, struct.pack("<2i", 7, 258))))
    tensor = _bytes_field(1, struct.pack("<2f", 0.5, -1.0)) + b"\x18\x01" + _bytes_field(4, b"\x02")
    datum = tokens + _bytes_field(2, _bytes_field(1, b"weights") + _bytes_field(2, tensor))
    quarter = b"\x09" + struct.pack("<d", 0.25)  # field 1, 64 bit
    config = _bytes_field(5, _bytes_field(1, b"beta") + b"\x11" + struct.pack("<d", 0.25))
    config_v2 = _bytes_field(7, _bytes_field(1, b"beta") + _bytes_field(2, quarter))
    golden = (
        _bytes_field(1, b"m")
        + b"\x10\x03"
        + _bytes_field(3, datum)
        + _bytes_field(4, b"ppo")
        + config
        + b"\x30\x01"
        + config_v2
    )
    assert wire.forward_backward_to_proto(call) == golden


def test_the_bytes_of_a_sample_are_those_of_the_protocol() -> None:
    response = types.SampleResponse([types.SampledSequence([9], [-0.5], "length")], prompt_logprobs=[None, -2.0])
    sequence = b"\x08\x01" + _bytes_field(2, struct.pack("<i", 9)) + _bytes_field(3, struct.pack("<f", -0.5))
    prompt = np.array([np.nan, -2.0], "<f4").tobytes()
    assert wire.sample_response_to_proto(response) == _bytes_field(1, sequence) + _bytes_field(2, prompt)


def test_bfloat16_and_int32_results_are_widened() -> None:
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="tinker:TensorDict")
    record = message.loss_fn_outputs.add(num_datums=1)
    record.fields["half"].data, record.fields["half"].dtype = struct.pack("<2H", 0x3F80, 0xC000), 4  # 1.0, -2.0
    record.fields["half"].offsets = struct.pack("<2q", 0, 4)
    record.fields["whole"].data, record.fields["whole"].dtype = struct.pack("<2i", 1, -1), 3
    record.fields["whole"].offsets = struct.pack("<2q", 0, 8)
    output = wire.forward_backward_output_from_proto(message.SerializeToString())
    assert output.loss_fn_output_type == "TensorDict"
    assert output.loss_fn_outputs == [
        {"half": types.TensorData([1.0, -2.0], "float32"), "whole": types.TensorData([1, -1], "int64")}
    ]


# --------------------------------------------------------------------------------------------------------------------
# JSON in detail


def test_a_sample_request_names_only_what_differs_from_the_defaults() -> None:
    plain = wire.sample_request_to_json(types.SampleRequest(types.ModelInput.from_ints([1])))
    assert plain == {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "num_samples": 1,
        "sampling_params": {"temperature": 1.0, "top_k": -1, "top_p": 1.0},
    }
    rich = wire.sample_request_to_json(
        types.SampleRequest(
            types.ModelInput.from_ints([1]),
            types.SamplingParams(max_tokens=4, stop=["x"], stop_token_ids=[2], seed=3, min_p=0.1),
            2,
            prompt_logprobs=True,
            prompt_logprobs_last_n=1,
        )
    )
    assert rich["sampling_params"] == {
        "max_tokens": 4, "stop": ["x", 2], "seed": 3, "min_p": 0.1, "temperature": 1.0, "top_k": -1, "top_p": 1.0,
    }  # fmt: skip
    assert rich["prompt_logprobs"] is True
    assert rich["prompt_logprobs_last_n"] == 1
    assert wire.sampling_params_from_json(rich["sampling_params"]).stop == ["x", 2]


def test_t1_stop_token_ids_arriving_by_name_are_honoured_and_others_refused() -> None:
    assert wire.sampling_params_from_json({"stop_token_ids": [2], "stop": "x"}).stop == ["x", 2]
    with pytest.raises(mint.BadRequest, match="'stop_tokens'"):
        wire.sampling_params_from_json({"stop_tokens": [2]})


def test_t2_adam_fields_left_out_on_the_wire_mean_the_sdks_defaults() -> None:
    params = wire.adam_params_from_json({"learning_rate": 1e-3})
    assert (params.learning_rate, params.beta2, params.eps) == (1e-3, 0.95, 1e-12)
    ours = wire.to_json(types.AdamParams())
    assert wire.adam_params_from_json(ours) == types.AdamParams()


def test_times_and_nested_records_survive_json() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    run = types.TrainingRun(
        "r",
        "base",
        "me",
        True,
        now,
        last_checkpoint=types.Checkpoint("weights/a", "training", now, "tinker://r/weights/a"),
    )
    assert wire.from_json(types.TrainingRun, wire.to_json(run) | {"a_newer_field": 1}) == run


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"chunks": [{"type": "image", "data": ""}]}, "text only"),
        ({"chunks": [{"tokens": [1.5]}]}, "integers"),
        ({"chunks": [{"tokens": [True]}]}, "integers"),
        ({"chunks": [{"tokens": [1], "token": 2}]}, "'token'"),
        ({"chunks": "abc"}, "list"),
        ([1, 2], "object"),
        ({}, "'chunks'"),
    ],
)
def test_a_malformed_model_input_is_refused_with_what_is_wrong(body: object, says: str) -> None:
    with pytest.raises(mint.BadRequest, match=says):
        wire.model_input_from_json(body)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(mint.BadRequest, match="protobuf"):
        wire.forward_backward_from_proto(b"\xff\xff\xff")
    with pytest.raises(mint.BadRequest, match="JSON"):
        wire.read_json(b"{")


@given(st.lists(st.binary(max_size=20), max_size=6), st.lists(st.integers(0, 150), max_size=6))
def test_frames_are_read_back_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    data, reader = wire.framed(bodies), wire.FrameReader()
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    read = [body for start, end in pairwise(edges) for body in reader.feed(data[start:end])]
    assert read == bodies == wire.read_frames(data)
    assert reader.whole


def test_a_frame_that_ends_early_is_refused() -> None:
    with pytest.raises(mint.BadRequest, match="last frame"):
        wire.read_frames(wire.framed([b"one", b"two"])[:-1])
