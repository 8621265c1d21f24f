"""`NativeDecoder`: a `FusedDecoder`'s weights, packed, and its passes in native code.

Holds a second copy of the weights, in the order the products read them; so models larger than MOST_BYTES stay with
torch. An adapter's matrices are packed when it is first met.

Shapes: T rows, N rows that want logits, H hidden size, V vocabulary, O outputs and I inputs of a projection, R rank.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mint.engine.fused import FusedDecoder, Projection, joined
from mint.engine.lora import Adapter, Rows
from mint.engine.native import structures
from mint.engine.native.structures import address

# Of packed weights. A machine that runs a larger model in float32 has better use for its memory.
MOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class TokenRows:
    """The tokens of a pass, row by row. Each sees what its sequence holds before it: positions up to its own."""

    token_T: np.ndarray
    position_T: np.ndarray
    line_T: np.ndarray
    """Which of the block tables is its sequence's."""
    table_LM: np.ndarray


class NativeDecoder:
    def __init__(self, functions: ctypes.CDLL, fused: FusedDecoder, block_size: int) -> None:
        self._functions = structures.declare(functions)
        self._fused = fused
        self.lanes: int = self._functions.mint_lanes()
        self._held: list[Any] = []  # what the structures point to
        self._layers = (structures.Layer * len(fused.layers))()
        for layer, native in zip(fused.layers, self._layers, strict=True):
            native.input_norm = self._hold(layer.input_norm)
            native.head_norm = self._hold(layer.head_norm)
            native.mlp_norm = self._hold(layer.mlp_norm)
            native.qkv, native.out, native.gate_up, native.down = map(self._packed, layer.projections)
            native.window = layer.window or 0
        self._decoder = structures.Decoder(
            num_layers=len(fused.layers),
            hidden=fused.embedding.shape[1],
            heads=fused.num_heads,
            kv_heads=fused.num_kv_heads,
            head_dim=fused.head_dim,
            intermediate=fused.layers[0].down.weight_OI.shape[1],
            block_size=block_size,
            eps=fused.eps,
            scale=fused.scale,
            embedding=self._hold(fused.embedding),
            final_norm=self._hold(fused.final_norm),
            cosine=self._hold(fused.cos_PD),
            sine=self._hold(fused.sin_PD),
            layers=self._layers,
            unembedding=self._packed(fused.unembedding),
        )
        self._adapters: WeakKeyDictionary[Adapter, _PackedAdapter] = WeakKeyDictionary()

    @staticmethod
    def serves(fused: FusedDecoder) -> bool:
        """Whether this model is one for it."""
        weights = [p.weight_OI for layer in fused.layers for p in layer.projections] + [fused.unembedding.weight_OI]
        held = sum(weight.nbytes for weight in weights)
        return all(weight.dtype == torch.float32 for weight in weights) and held <= MOST_BYTES

    def use_cache(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Where the blocks of each layer are from now on; the caller holds them."""
        for native, key, value in zip(self._layers, keys, values, strict=True):
            native.keys, native.values = address(key), address(value)

    def forget(self, adapter: Adapter) -> None:
        self._adapters.pop(adapter, None)

    def hidden(self, tokens: TokenRows, rows: Rows, threads: int) -> Tensor:
        """The final hidden states, after the last norm."""
        count = len(tokens.token_T)
        out_TH = torch.empty(count, self._decoder.hidden)
        runs = self._runs(rows)
        batch = structures.Batch(
            rows=count,
            tokens=address(tokens.token_T),
            positions=address(tokens.position_T),
            lines=address(tokens.line_T),
            tables=address(tokens.table_LM),
            table_width=tokens.table_LM.shape[1],
            runs=runs,
            num_runs=len(runs),
            threads=threads,
        )
        self._functions.mint_hidden(self._decoder, batch, address(out_TH))
        return out_TH

    def logits(self, hidden_NH: Tensor, rows: Rows, threads: int) -> Tensor:
        hidden_NH = hidden_NH.contiguous()
        out_NV = torch.empty(len(hidden_NH), self._decoder.unembedding.outputs)
        runs = self._runs(rows)
        self._functions.mint_logits(
            self._decoder, address(hidden_NH), len(hidden_NH), runs, len(runs), threads, address(out_NV)
        )
        return out_NV

    def draw(
        self, logits_NV: Tensor, temperature_N: np.ndarray, uniform_N: np.ndarray, threads: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A token of each row from its whole distribution, and the token's log-prob without temperature."""
        rows, vocabulary = logits_NV.shape
        token_N, logprob_N = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.float32)
        temperature_N, uniform_N = temperature_N.astype(np.float32), np.ascontiguousarray(uniform_N, dtype=np.float64)
        self._functions.mint_draw(
            address(logits_NV), rows, vocabulary, address(temperature_N), address(uniform_N), threads,
            address(token_N), address(logprob_N),
        )  # fmt: skip
        return token_N, logprob_N

    def _hold(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._held.append(tensor.detach().contiguous())
        return address(self._held[-1])

    def _packed(self, projection: Projection) -> structures.Matrix:
        outputs, inputs = projection.weight_OI.shape
        packed = _pack(self._functions, projection.weight_OI)
        return structures.Matrix(self._hold(packed), self._hold(projection.bias_O), outputs, inputs)

    def _runs(self, rows: Rows) -> Any:
        runs = (structures.Run * len(rows))()
        for run, (adapter, count) in zip(runs, rows, strict=True):
            run.rows = count
            if adapter is not None:
                run.adapter = self._adapter(adapter).parts
        return runs

    def _adapter(self, adapter: Adapter) -> _PackedAdapter:
        if adapter not in self._adapters:
            self._adapters[adapter] = _PackedAdapter(self._functions, self._fused, adapter)
        return self._adapters[adapter]


class _PackedAdapter:
    """One adapter's part of every projection: `parts`, and what they point to."""

    def __init__(self, functions: ctypes.CDLL, fused: FusedDecoder, adapter: Adapter) -> None:
        projections = [p for layer in fused.layers for p in layer.projections] + [fused.unembedding]
        self.parts = (structures.LowRank * len(projections))()
        self._held: list[Tensor] = []
        for part, projection in zip(self.parts, projections, strict=True):
            if (pair := joined(adapter, projection)) is not None:
                self._pack(functions, part, *pair)

    def _pack(self, functions: ctypes.CDLL, part: structures.LowRank, down_RI: Tensor, up_RO: Tensor) -> None:
        rank, outputs = up_RO.shape
        down = _pack(functions, down_RI)
        up = torch.empty(functions.mint_padded(outputs) * rank)
        ranges = torch.empty(2 * -(-outputs // functions.mint_lanes()), dtype=torch.int64)
        functions.mint_pack_up(address(up_RO), rank, outputs, address(up), address(ranges))
        part.down, part.up, part.ranges, part.rank = address(down), address(up), address(ranges), rank
        self._held += [down, up, ranges]


def _pack(functions: ctypes.CDLL, weight_OI: Tensor) -> Tensor:
    outputs, inputs = weight_OI.shape
    plain, packed = weight_OI.detach().contiguous(), torch.empty(functions.mint_padded(outputs) * inputs)
    functions.mint_pack(address(plain), outputs, inputs, address(packed))
    return packed
