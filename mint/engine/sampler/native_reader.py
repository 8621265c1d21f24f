"""Reads a step's tokens through the model in native code: float32 on a CPU, for the families with fused layers.

Every row is computed by itself, in one order of sums, so nothing is padded and prompts are read like anything else.
`torch_reader` is the reference.

Shapes: T tokens, L sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from mint.engine.device import cores
from mint.engine.lora import Adapter, Rows
from mint.engine.model import BaseModel
from mint.engine.native.decoder import NativeDecoder, TokenRows
from mint.engine.sampler.drawing import Drawn, drawn_from, runs_of, uniforms_of
from mint.engine.sampler.paged import Blocks
from mint.engine.sampler.scheduler import Work
from mint.engine.sampler.sequence import Sequence
from mint.engine.sampler.tables import BlockTables


class NativeStore(Blocks):
    """Blocks in the native layout (see `native/attention.h`)."""

    def __init__(self, model: BaseModel, block_size: int, decoder: NativeDecoder) -> None:
        slots, width = (-(-size // decoder.lanes) * decoder.lanes for size in (block_size, model.head_dim))
        heads = model.num_kv_heads
        super().__init__(model, block_size, (heads, model.head_dim, slots), (heads, block_size, width))
        self._decoder = decoder

    def grow(self, blocks: int) -> None:
        if len(self.keys[0]) < blocks:
            super().grow(blocks)
            self._decoder.use_cache(self.keys, self.values)

    def clear(self, blocks: Many[int]) -> None:
        """Nothing to do: what a sequence did not write never enters a sum."""


class NativeReader:
    def __init__(self, model: BaseModel, decoder: NativeDecoder, block_size: int) -> None:
        self._decoder = decoder
        self.store = NativeStore(model, block_size, decoder)
        self._tables = BlockTables()

    def forget(self, adapter: Adapter) -> None:
        self._decoder.forget(adapter)

    def hidden(self, works: list[Work]) -> Tensor:
        table_LM = self._tables.update([work.sequence.blocks for work in works])
        rows = runs_of((work.sequence.group.adapter, work.count) for work in works)
        with cores().lend() as threads:
            return self._decoder.hidden(_rows_of(works, table_LM), rows, threads)

    def logits(self, hidden_NH: Tensor, rows: Rows) -> Tensor:
        with cores().lend() as threads:
            return self._decoder.logits(hidden_NH, rows, threads)

    def drawn(self, logits_NV: Tensor, sequences: list[Sequence]) -> list[Drawn]:
        """Row by row, the plain ones in native code: which way a row takes is its own affair."""
        plain = [sequence.group.plain for sequence in sequences]
        if all(plain):
            return self._draw(logits_NV, sequences)
        found: dict[Sequence, Drawn] = {}
        for wanted, draw in ((True, self._draw), (False, drawn_from)):
            places = [place for place, is_plain in enumerate(plain) if is_plain == wanted]
            if places:
                rows_NV = logits_NV.index_select(0, torch.tensor(places))
                found.update((drawn.sequence, drawn) for drawn in draw(rows_NV, [sequences[n] for n in places]))
        return [found[sequence] for sequence in sequences]

    def decoded(self, works: list[Work]) -> list[Drawn] | None:
        sequences = [work.sequence for work in works]
        if not all(sequence.group.plain for sequence in sequences):
            return None
        table_LM = self._tables.update([sequence.blocks for sequence in sequences])
        rows = runs_of((sequence.group.adapter, 1) for sequence in sequences)
        with cores().lend() as threads:
            return _drawn(
                sequences, *self._decoder.decode(_rows_of(works, table_LM), rows, *_draws_of(sequences), threads)
            )

    def _draw(self, logits_NV: Tensor, sequences: list[Sequence]) -> list[Drawn]:
        with cores().lend() as threads:
            return _drawn(sequences, *self._decoder.draw(logits_NV, *_draws_of(sequences), threads))


def _draws_of(sequences: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """The temperatures and random numbers of their next draws."""
    temperature_N = np.array([sequence.group.params.temperature for sequence in sequences], dtype=np.float32)
    return temperature_N, uniforms_of(sequences, 1)[0]


def _drawn(sequences: list[Sequence], token_N: np.ndarray, logprob_N: np.ndarray) -> list[Drawn]:
    drawn = zip(sequences, token_N[:, None].tolist(), logprob_N[:, None].tolist(), strict=True)
    return [Drawn(*each) for each in drawn]


def _rows_of(works: list[Work], table_LM: np.ndarray) -> TokenRows:
    sequences = [work.sequence for work in works]
    if all(work.count == 1 for work in works):
        position_T = np.array([sequence.computed for sequence in sequences])
        token_T = np.array([sequence.tokens[sequence.computed] for sequence in sequences])
        return TokenRows(token_T, position_T, np.arange(len(works)), table_LM)
    tokens: list[int] = []
    for work in works:
        tokens += work.sequence.tokens[work.sequence.computed : work.sequence.computed + work.count]
    spans = [np.arange(work.sequence.computed, work.sequence.computed + work.count) for work in works]
    line_T = np.repeat(np.arange(len(works)), [work.count for work in works])
    return TokenRows(np.array(tokens), np.concatenate(spans), line_T, table_LM)
