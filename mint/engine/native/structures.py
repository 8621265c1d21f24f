"""What is handed to native code: the structures of `model.h`, `adapter.h`, `decoder.cpp` and `training_space.h`, field
by field, and the functions' types."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p

import numpy as np
from torch import Tensor


class Matrix(Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("halves", c_void_p),
        ("pairs", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
    )


class Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("head_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("attention_norm", c_void_p),
        ("gated_norm", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("window", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Decoder(Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("intermediate", c_int64),
        ("block_size", c_int64),
        ("gelu", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("embedding_scale", c_float),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("unembedding", Matrix),
    )


class LowRank(Structure):
    _fields_ = (("down", c_void_p), ("up", c_void_p), ("ranges", c_void_p), ("rank", c_int64))


class Run(Structure):
    _fields_ = (("adapter", POINTER(LowRank)), ("rows", c_int64))


class Batch(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("lines", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int64),
        ("runs", POINTER(Run)),
        ("num_runs", c_int64),
        ("threads", c_int64),
    )


class AdaptedLinear(Structure):
    _fields_ = (
        ("down", c_void_p),
        ("up", c_void_p),
        ("projection", c_int64),
        ("first", c_int64),
        ("outputs", c_int64),
    )


class Adapter(Structure):
    _fields_ = (("linears", POINTER(AdaptedLinear)), ("count", c_int64), ("rank", c_int64), ("scale", c_float))


class Back(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("pairs", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("step", c_int64),
    )


class Model(Structure):
    _fields_ = (("decoder", POINTER(Decoder)), ("back", POINTER(Back)), ("unembedding_VH", c_void_p))


class MicroBatch(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("num_nodes", c_int64),
        ("lengths", c_void_p),
        ("parents", c_void_p),
        ("num_cells", c_int64),
        ("live", c_int64),
        ("order", c_void_p),
        ("places", c_void_p),
        ("targets", c_void_p),
        ("temperature", c_float),
        ("adapter", POINTER(Adapter)),
        ("keep", c_int64),
        ("lean", c_int64),
        ("threads", c_int64),
        ("memory", c_void_p),
    )


def declare(functions: ctypes.CDLL) -> ctypes.CDLL:
    """The functions with their types: a pointer taken for an int would lose half of itself."""
    signatures = {
        "mint_lanes": ([], c_int64),
        "mint_padded": ([c_int64], c_int64),
        "mint_pack": ([c_void_p, c_int64, c_int64, c_void_p], None),
        "mint_pack_pairs": ([c_void_p, c_int64, c_int64, c_void_p], None),
        "mint_multiplies_pairs": ([], c_int64),
        "mint_adapter_memory": ([POINTER(Decoder), POINTER(Adapter)], c_int64),
        "mint_pack_adapter": ([POINTER(Decoder), POINTER(Adapter), c_void_p, POINTER(LowRank)], None),
        "mint_hidden": ([POINTER(Decoder), POINTER(Batch), c_void_p], None),
        "mint_logits": ([POINTER(Decoder), c_void_p, c_int64, POINTER(Run), c_int64, c_int64, c_void_p], None),
        "mint_draw": ([c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p], None),
        "mint_decode": ([POINTER(Decoder), POINTER(Batch), c_void_p, c_void_p, c_void_p, c_void_p], None),
        "mint_pack_back": ([c_void_p, c_int64, c_int64, c_void_p], None),
        "mint_pack_pairs_back": ([c_void_p, c_int64, c_int64, c_void_p], None),
        "mint_training_memory": ([POINTER(Model), POINTER(MicroBatch)], c_int64),
        "mint_training_forward": ([POINTER(Model), POINTER(MicroBatch), c_void_p], None),
        "mint_training_backward": ([POINTER(Model), POINTER(MicroBatch), c_void_p, c_void_p], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, result
    return functions


def address(numbers: Tensor | np.ndarray | None) -> int | None:
    """Of numbers that lie one after the other, and must outlive the call."""
    if numbers is None:
        return None
    if isinstance(numbers, np.ndarray):
        assert numbers.flags.c_contiguous
        return numbers.ctypes.data
    assert numbers.is_contiguous()
    return numbers.data_ptr()
