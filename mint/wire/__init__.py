"""Types to and from bytes: the JSON and the protobuf of the Tinker wire, in both directions.

Client and server both use this package, and nobody else knows the encoding. Whatever arrives is checked here for shape
only (unknown fields are refused by name); what needs a model's facts is checked by who has them.
"""

from mint.wire.calls import ForwardBackwardCall, ReverseKLCall, SampleCall
from mint.wire.frames import FrameReader, framed, read_frames
from mint.wire.json_bodies import (
    adam_params_from_json,
    check_text,
    forward_backward_from_json,
    forward_backward_output_from_json,
    from_json,
    model_input_from_json,
    read_json,
    reverse_kl_from_json,
    sample_call_from_json,
    sample_request_to_json,
    sample_response_from_json,
    sampling_params_from_json,
    tensor_from_json,
    to_json,
)
from mint.wire.media import FRAMES, HELD, HOLD, JSON, LATER, PROTOBUF, SAMPLER
from mint.wire.proto_requests import forward_backward_from_proto, forward_backward_to_proto
from mint.wire.proto_results import (
    forward_backward_output_from_proto,
    forward_backward_output_to_proto,
    sample_response_from_proto,
    sample_response_to_proto,
)
from mint.wire.sequence import sequence_of

__all__ = [
    "FRAMES",
    "HELD",
    "HOLD",
    "JSON",
    "LATER",
    "PROTOBUF",
    "SAMPLER",
    "ForwardBackwardCall",
    "FrameReader",
    "ReverseKLCall",
    "SampleCall",
    "adam_params_from_json",
    "check_text",
    "forward_backward_from_json",
    "forward_backward_from_proto",
    "forward_backward_output_from_json",
    "forward_backward_output_from_proto",
    "forward_backward_output_to_proto",
    "forward_backward_to_proto",
    "framed",
    "from_json",
    "model_input_from_json",
    "read_frames",
    "read_json",
    "reverse_kl_from_json",
    "sample_call_from_json",
    "sample_request_to_json",
    "sample_response_from_json",
    "sample_response_from_proto",
    "sample_response_to_proto",
    "sampling_params_from_json",
    "sequence_of",
    "tensor_from_json",
    "to_json",
]
