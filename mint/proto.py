"""The protobuf messages of the Tinker wire (proto3), as classes built from the table below when imported.

A table rather than generated code: generated modules demand a protobuf runtime at least as new as their generator, and
would claim the names of the official SDK's own schema, so that both packages could not live in one process. Only field
numbers and types travel, so the package name is ours to choose. Packed arrays are raw little-endian bytes.
Used by `mint.wire` alone.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "mint_wire"

# message -> fields "number name type [modifier]"; modifier: repeated, optional (explicit presence), oneof:NAME.
# map<V> is a map from string to V.
_MESSAGES = {
    "EncodedTextChunk": ["1 tokens bytes"],
    "ImageDimensions": ["1 width uint32", "2 height uint32"],
    "ImageChunk": [
        "1 data bytes",
        "2 format string",
        "3 expected_tokens int32 optional",
        "4 override_dimensions ImageDimensions",
    ],
    "DmelChunk": ["1 dmel bytes"],
    "Chunk": [
        "1 encoded_text EncodedTextChunk oneof:chunk",
        "2 image ImageChunk oneof:chunk",
        "3 dmel DmelChunk oneof:chunk",
    ],
    "SparseCsr": ["1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"],
    "Tensor": [
        "1 dense bytes oneof:encoding",
        "2 sparse_csr SparseCsr oneof:encoding",
        "3 dtype int32",
        "4 shape int64 repeated",
    ],
    "SpanBody": ["1 sequence_id string", "2 offset int64", "3 length int64"],
    "ProvenanceSpan": ["1 prompt_tokens SpanBody oneof:span", "2 sampled_tokens SpanBody oneof:span"],
    "Datum": [
        "1 model_input Chunk repeated",
        "2 loss_fn_inputs map<Tensor>",
        "3 model_input_spans ProvenanceSpan repeated",
        "4 loss_fn_input_spans ProvenanceSpan repeated",
    ],
    "LossConfigValue": ["1 number double oneof:value", "2 text string oneof:value"],
    "ForwardBackwardRequest": [
        "1 model_id string",
        "2 seq_id int32",
        "3 data Datum repeated",
        "4 loss_fn string",
        "5 loss_fn_config map<double>",
        "6 forward_only bool",
        "7 loss_fn_config_v2 map<LossConfigValue>",
    ],
    "BatchedTensor": ["1 data bytes", "2 offsets bytes", "3 dtype int32", "4 trailing_shape int64 repeated"],
    "ArrayRecord": ["1 type_tag string", "2 fields map<BatchedTensor>", "3 num_datums int64"],
    "ForwardBackwardOutput": [
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs ArrayRecord repeated",
        "3 metrics map<double>",
    ],
    "TopkLogprobs": ["1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"],
    "SampledSequence": [
        "1 stop_reason int32",
        "2 tokens bytes",
        "3 logprobs bytes optional",
        "4 topk_sampled_logprobs TopkLogprobs",
    ],
    "PromptAltTokens": ["1 tokens Tensor", "2 logprobs Tensor"],
    "SampleResponse": [
        "1 sequences SampledSequence repeated",
        "2 prompt_logprobs bytes optional",
        "3 topk_prompt_logprobs TopkLogprobs",
        "4 prompt_cache_hit_tokens int32",
        "5 target_prompt_logprobs Tensor",
        "6 prompt_alt_tokens PromptAltTokens",
    ],
}
# Enums (DType, StopReason) are declared int32 above: the same bytes on the wire.

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


def _add_map(message: Any, field: Any, value_kind: str) -> None:
    entry = message.nested_type.add(name=field.name.title().replace("_", "") + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), value_kind)
    field.label = _Field.LABEL_REPEATED
    _set_type(field, f"{message.name}.{entry.name}")


def _add_field(message: Any, spec: str) -> None:
    number, name, kind, *modifier = spec.split()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if kind.startswith("map<"):
        return _add_map(message, field, kind[4:-1])
    _set_type(field, kind)
    if modifier == ["repeated"]:
        field.label = _Field.LABEL_REPEATED
    elif modifier == ["optional"]:
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    elif modifier:
        oneof = modifier[0].removeprefix("oneof:")
        names = [declared.name for declared in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
            names.append(oneof)
        field.oneof_index = names.index(oneof)


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="mint_wire.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for spec in fields:
            _add_field(message, spec)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


MESSAGES = _build()
