"""`PackedWeights`: a `FusedDecoder`'s weights in the order that native products read them, for sampling and training.

Holds a second copy of the weights, so models larger than MOST_BYTES stay with torch; and for training a third, by their
inputs, of models up to MOST_BYTES_THRICE. Of models that were published in bfloat16, as most are, there is half a copy
more in that format, the same numbers: few rows take as long as it takes to fetch the weights from memory.

Where products are computed in bfloat16 (`Device.bfloat16_products`) both copies are in that format, in pairs of inputs.

Shapes: O outputs and I inputs of a projection.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.fused import GELU, FusedDecoder, Projection
from mint.engine.lora import Adapter
from mint.engine.native import structures
from mint.engine.native.library import library
from mint.engine.native.structures import address

if TYPE_CHECKING:
    from mint.engine.model import BaseModel

# Of packed weights. A machine that runs a larger model in float32 has better use for its memory.
MOST_BYTES = 4 * 2**30
# Larger models train with the weights as they are, a twentieth slower.
MOST_BYTES_THRICE = 2**30
# Weights that the processor's caches may hold from one step to the next are as fast as they are.
CACHED_BYTES = 64 * 2**20


class PackedWeights:
    def __init__(self, functions: ctypes.CDLL, fused: FusedDecoder, in_pairs: bool = False) -> None:
        self.functions = structures.declare(functions)
        self.fused = fused
        self.in_pairs = in_pairs
        self.projections = _projections(fused)
        """Four a layer, then the unembedding: the order of an adapter's parts."""
        self.places = _places(self.projections)
        self.halved = not in_pairs and _gain_by_halves([projection.weight_OI for projection in self.projections])
        self._held: list[Tensor] = []  # what the structures point to
        self._matrices = [self._packed(projection) for projection in self.projections]

    @classmethod
    def of(cls, model: BaseModel) -> PackedWeights | None:
        """None where sampling and training go through torch: on a GPU, in another number format than float32, for a
        family without fused layers, for a model that is too large, on a machine without a compiler."""
        if model.device.type != "cpu" or model.fused is None:
            return None
        weights = [projection.weight_OI for projection in _projections(model.fused)]
        if any(weight.dtype != torch.float32 for weight in weights) or sum(w.nbytes for w in weights) > MOST_BYTES:
            return None
        functions = library().functions
        return None if functions is None else cls(functions, model.fused, model.bfloat16_products)

    def layers(self) -> Any:
        """An array of them, without a cache."""
        layers = (structures.Layer * len(self.fused.layers))()
        for number, (layer, native) in enumerate(zip(self.fused.layers, layers, strict=True)):
            native.input_norm = self._hold(layer.input_norm)
            native.head_norm = self._hold(layer.head_norm)
            native.mlp_norm = self._hold(layer.mlp_norm)
            native.attention_norm = self._hold(layer.attention_norm)
            native.gated_norm = self._hold(layer.gated_norm)
            native.cosine, native.sine = map(self._hold, layer.rotary)
            native.qkv, native.out, native.gate_up, native.down = self._matrices[4 * number : 4 * number + 4]
            native.window = layer.window or 0
        return layers

    def decoder(self, layers: Any, block_size: int) -> structures.Decoder:
        """`block_size` of the cache; 0 where there is none."""
        fused = self.fused
        return structures.Decoder(
            num_layers=len(fused.layers),
            hidden=fused.embedding.shape[1],
            heads=fused.num_heads,
            kv_heads=fused.num_kv_heads,
            head_dim=fused.head_dim,
            intermediate=fused.layers[0].down.weight_OI.shape[1],
            block_size=block_size,
            gelu=fused.act == GELU,
            eps=fused.eps,
            scale=fused.scale,
            embedding_scale=fused.embedding_scale,
            embedding=self._hold(fused.embedding),
            final_norm=self._hold(fused.final_norm),
            layers=layers,
            unembedding=self._matrices[-1],
        )

    def back(self) -> Any:
        """The projections for the way back, an array."""
        packs = sum(projection.weight_OI.nbytes for projection in self.projections) <= MOST_BYTES_THRICE
        make = self._pairs_back if self.in_pairs else self._packed_back if packs else self._plain_back
        return (structures.Back * len(self.projections))(*map(make, self.projections))

    def _packed_back(self, projection: Projection) -> structures.Back:
        outputs, inputs = projection.weight_OI.shape
        plain, packed = projection.weight_OI.detach().contiguous(), self.room(inputs, outputs)
        self.functions.mint_pack_back(address(plain), outputs, inputs, address(packed))
        return structures.Back(self._hold(packed), None, outputs, inputs, 0)

    def _pairs_back(self, projection: Projection) -> structures.Back:
        outputs, inputs = projection.weight_OI.shape
        halves, packed = _halves(projection), self._room_for_pairs(inputs, outputs)
        self.functions.mint_pack_pairs_back(address(halves), outputs, inputs, address(packed))
        return structures.Back(None, self._hold(packed), outputs, inputs, 0)

    def _plain_back(self, projection: Projection) -> structures.Back:
        """Copied only where rows are no whole vectors."""
        outputs, inputs = projection.weight_OI.shape
        rows_OI = projection.weight_OI.detach()
        if missing := -inputs % self.functions.mint_lanes():
            rows_OI = F.pad(rows_OI, (0, missing))
        return structures.Back(self._hold(rows_OI), None, outputs, inputs, rows_OI.shape[1])

    def _hold(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._held.append(tensor.detach().contiguous())
        return address(self._held[-1])

    def _packed(self, projection: Projection) -> structures.Matrix:
        outputs, inputs = projection.weight_OI.shape
        bias = self._hold(projection.bias_O)
        if self.in_pairs:
            plain, pairs = _halves(projection), self._room_for_pairs(outputs, inputs)
            self.functions.mint_pack_pairs(address(plain), outputs, inputs, address(pairs))
            return structures.Matrix(None, None, self._hold(pairs), bias, outputs, inputs)
        packed = pack(self.functions, projection.weight_OI)
        halves = self._hold(packed.bfloat16()) if self.halved else None
        return structures.Matrix(self._hold(packed), halves, None, bias, outputs, inputs)

    def room(self, outputs: int, inputs: int) -> Tensor:
        """For a packed matrix."""
        return torch.empty(self.functions.mint_padded(outputs) * inputs)

    def _room_for_pairs(self, outputs: int, inputs: int) -> Tensor:
        return torch.empty(self.functions.mint_padded(outputs) * ((inputs + 1) // 2), dtype=torch.int32)


class AdapterMatrices:
    """An adapter's matrices as they lie, for native code to pack: `structure`, and what it points to. Those of linears
    that the model does not have are none of its business, here as in torch."""

    def __init__(self, weights: PackedWeights, adapter: Adapter) -> None:
        known = {weights.places[path]: pair for path, pair in adapter.weights.items() if path in weights.places}
        linears = (structures.AdaptedLinear * len(known))()
        self._held: list[Tensor] = []
        for linear, (place, pair) in zip(linears, known.items(), strict=True):
            down, up = (half.detach().to(torch.float32).contiguous() for half in pair)
            self._held += (down, up)
            linear.down, linear.up = address(down), address(up)
            linear.projection, linear.first, linear.outputs = place
        self.parameters = sum(half.numel() for half in self._held)
        self.structure = structures.Adapter(linears, len(linears), adapter.config.rank, adapter.scale)


def pack(functions: ctypes.CDLL, weight_OI: Tensor) -> Tensor:
    outputs, inputs = weight_OI.shape
    plain, packed = weight_OI.detach().contiguous(), torch.empty(functions.mint_padded(outputs) * inputs)
    functions.mint_pack(address(plain), outputs, inputs, address(packed))
    return packed


def _halves(projection: Projection) -> Tensor:
    return projection.weight_OI.detach().to(torch.bfloat16).contiguous()


def _gain_by_halves(weights: list[Tensor]) -> bool:
    """Whether bfloat16 loses nothing of these weights and they are too many to stay in the caches."""
    if sum(weight.nbytes for weight in weights) <= CACHED_BYTES:
        return False
    return all(torch.equal(weight.bfloat16().float(), weight) for weight in weights)


def _projections(fused: FusedDecoder) -> list[Projection]:
    return [projection for layer in fused.layers for projection in layer.projections] + [fused.unembedding]


def _places(projections: list[Projection]) -> dict[str, tuple[int, int, int]]:
    """Of every linear: the number of its projection, its first output there, and how many are its own."""
    places = {}
    for number, projection in enumerate(projections):
        firsts = [0, *accumulate(projection.sizes)]
        for path, first, size in zip(projection.paths, firsts, projection.sizes, strict=False):
            places[path] = number, first, size
    return places
