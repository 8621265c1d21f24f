"""`NativeDecoder`: the passes of sampling in native code. An adapter's matrices are packed when it is first met.

Shapes: T rows, N rows that want logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import Adapter, Rows
from mint.engine.native import structures
from mint.engine.native.structures import address
from mint.engine.native.weights import AdapterMatrices, PackedWeights


@dataclass(frozen=True)
class TokenRows:
    """The tokens of a pass, row by row. Each sees what its sequence holds before it: positions up to its own."""

    token_T: np.ndarray
    position_T: np.ndarray
    line_T: np.ndarray
    """Which of the block tables is its sequence's."""
    table_LM: np.ndarray


class NativeDecoder:
    def __init__(self, weights: PackedWeights, block_size: int) -> None:
        self._weights, self._functions = weights, weights.functions
        self.lanes: int = self._functions.mint_lanes()
        self._layers = weights.layers()
        self._decoder = weights.decoder(self._layers, block_size)
        self._adapters: WeakKeyDictionary[Adapter, _PackedAdapter] = WeakKeyDictionary()

    def use_cache(self, keys: list[Tensor], values: list[Tensor]) -> None:
        """Where the blocks of each layer are from now on; the caller holds them."""
        for native, key, value in zip(self._layers, keys, values, strict=True):
            native.keys, native.values = address(key), address(value)

    def forget(self, adapter: Adapter) -> None:
        self._adapters.pop(adapter, None)

    def hidden(self, tokens: TokenRows, rows: Rows, threads: int) -> Tensor:
        """The final hidden states, after the last norm."""
        out_TH = torch.empty(len(tokens.token_T), self._decoder.hidden)
        self._functions.mint_hidden(self._decoder, self._batch(tokens, rows, threads), address(out_TH))
        return out_TH

    def decode(
        self, tokens: TokenRows, rows: Rows, temperature_N: np.ndarray, uniform_N: np.ndarray, threads: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """What `hidden`, `logits` and `draw` give one after the other where every row draws: tokens and log-probs."""
        count = len(tokens.token_T)
        temperature_N, uniform_N = _as_drawn_with(temperature_N, uniform_N)
        token_N, logprob_N = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
        self._functions.mint_decode(
            self._decoder, self._batch(tokens, rows, threads), address(temperature_N), address(uniform_N),
            address(token_N), address(logprob_N),
        )  # fmt: skip
        return token_N, logprob_N

    def _batch(self, tokens: TokenRows, rows: Rows, threads: int) -> structures.Batch:
        runs = self._runs(rows)
        return structures.Batch(
            rows=len(tokens.token_T),
            tokens=address(tokens.token_T),
            positions=address(tokens.position_T),
            lines=address(tokens.line_T),
            tables=address(tokens.table_LM),
            table_width=tokens.table_LM.shape[1],
            runs=runs,
            num_runs=len(runs),
            threads=threads,
        )

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
        temperature_N, uniform_N = _as_drawn_with(temperature_N, uniform_N)
        token_N, logprob_N = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.float32)
        self._functions.mint_draw(
            address(logits_NV), rows, vocabulary, address(temperature_N), address(uniform_N), threads,
            address(token_N), address(logprob_N),
        )  # fmt: skip
        return token_N, logprob_N

    def _runs(self, rows: Rows) -> Any:
        runs = (structures.Run * len(rows))()
        for run, (adapter, count) in zip(runs, rows, strict=True):
            run.rows = count
            if adapter is not None:
                run.adapter = self._adapter(adapter).parts
        return runs

    def _adapter(self, adapter: Adapter) -> _PackedAdapter:
        if adapter not in self._adapters:
            self._adapters[adapter] = _PackedAdapter(self._weights, self._decoder, adapter)
        return self._adapters[adapter]


class _PackedAdapter:
    """One adapter's part of every projection: `parts`, and what they point to."""

    def __init__(self, weights: PackedWeights, decoder: structures.Decoder, adapter: Adapter) -> None:
        functions, matrices = weights.functions, AdapterMatrices(weights, adapter)
        self.parts = (structures.LowRank * len(weights.projections))()
        self._room = torch.empty(functions.mint_adapter_memory(decoder, matrices.structure))
        functions.mint_pack_adapter(decoder, matrices.structure, address(self._room), self.parts)


def _as_drawn_with(temperature_N: np.ndarray, uniform_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(temperature_N, np.float32), np.ascontiguousarray(uniform_N, np.float64)
