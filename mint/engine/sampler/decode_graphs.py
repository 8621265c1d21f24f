"""Decoding steps as recorded CUDA graphs: one a size, over buffers that stay where they are.

Sizes are rounded up, so that a few graphs serve all batches: rows, sequences among them (the other rows fill tiles),
and the longest context.

Shapes: N rows, A sequences, M blocks of the longest sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mint.engine.kernels import decode_state, paged_attention
from mint.engine.kernels import draw as draw_kernel
from mint.engine.kernels.rows import TILE, Tables
from mint.engine.sampler.kernel_pass import KernelPass, PassRows, rounded_rows
from mint.engine.sampler.paged import BlockStore
from mint.engine.sampler.recorder import Recorder
from mint.engine.sampler.transfer import put, to_device

_FIRST_ROWS = 256


class Size(NamedTuple):
    """What a graph is recorded for, each rounded up."""

    rows: int
    sequences: int
    longest: int
    """Tokens of the longest context."""
    adapted: bool
    """Whether an adapter sits on the unembedding."""


@dataclass(frozen=True)
class Batch:
    """Sequences about to decode."""

    place_A: np.ndarray
    """The row of each sequence."""
    slot_of_tile: np.ndarray
    token_A: np.ndarray
    position_A: np.ndarray
    left_A: np.ndarray
    """Tokens each may still draw."""
    table_AM: np.ndarray
    longest: int
    """Tokens of the longest, those it will draw included."""
    adapted: bool
    """Whether some adapter sits on the unembedding."""


@dataclass(frozen=True)
class Rest:
    """Those of a batch that go on after as many steps as each of them was given; columns as in the batch."""

    slot_of_tile: np.ndarray
    left_A: np.ndarray
    """0: it does not go on."""
    table_AM: np.ndarray
    longest: int


class DecodeGraphs:
    def __init__(self, kernel_pass: KernelPass, store: BlockStore, vocabulary: int, max_blocks: int) -> None:
        """`max_blocks`: of one sequence."""
        self._pass = kernel_pass
        self._store = store
        self._vocabulary = vocabulary
        self._max_blocks = max_blocks
        self._device, self._dtype = store.keys[0].device, store.keys[0].dtype
        self._recorder = Recorder(store, after=1)  # the next step is of the same size
        self._capacity = 0
        self._size = Size(0, 0, 0, False)
        self._places = np.zeros(0, dtype=np.int64)

    def load(self, batch: Batch, tables: Tables) -> Size:
        """Puts the batch into the buffers; its size."""
        rows = rounded_rows(len(batch.slot_of_tile) * TILE)
        count = len(batch.place_A)
        size = Size(rows, min(rows, _round_sequences(count)), _round_context(batch.longest), batch.adapted)
        if rows > self._capacity:
            self._allocate(max(rows, _FIRST_ROWS, 2 * self._capacity))
        self._recorder.check(tables)
        self._size, self._places = size, batch.place_A
        numbers = np.zeros((3, rows), dtype=np.int32)
        numbers[:, batch.place_A] = batch.token_A, batch.position_A, batch.left_A
        for buffer, values in zip((self._token, self._position, self._left), numbers, strict=True):
            put(values, buffer[:rows])
        self._put_lines(batch.slot_of_tile, batch.left_A, batch.table_AM)
        return size

    def go_on(self, rest: Rest, tables: Tables) -> Size:
        """For more tokens of the batch, from those it has drawn."""
        self._recorder.check(tables)
        size = self._size = self._size._replace(longest=_round_context(rest.longest))
        left = np.zeros(size.rows, dtype=np.int32)
        left[self._places] = rest.left_A
        put(left, self._left[: size.rows])
        # At the end of its steps a sequence stands at the last token it read.
        self._position[: size.rows].add_(self._left[: size.rows] > 0)
        self._put_lines(rest.slot_of_tile, rest.left_A, rest.table_AM)
        return size

    def _put_lines(self, slot_of_tile: np.ndarray, left_A: np.ndarray, table_AM: np.ndarray) -> None:
        rows, sequences, _, _ = self._size
        active = np.full(sequences, -1, dtype=np.int32)
        active[: len(left_A)] = np.where(left_A > 0, self._places, -1)
        put(active, self._active[:sequences])
        tiles = np.zeros(rows // TILE, dtype=np.int32)
        tiles[: len(slot_of_tile)] = slot_of_tile
        put(tiles, self._slot_of_tile[: len(tiles)])
        table = np.zeros((rows, table_AM.shape[1]), dtype=np.int32)
        table[self._places] = table_AM
        self._table[:rows, : table.shape[1]].copy_(to_device(table, self._device))

    def logits(self, size: Size) -> Tensor:
        """[rows, V] of the batch's next tokens, their keys and values now in the cache. Overwritten by the next."""
        return self._recorder.run(size, partial(self._forward, size))

    def draw(self, size: Size, temperature_A: Tensor, uniform_A: Tensor, ids_A: Tensor, logprobs_A: Tensor) -> None:
        """Draws from the last logits, and moves every sequence on to the token it drew."""
        active_A = self._active[: size.sequences]
        draw_kernel.draw(self._logits[: size.rows], active_A, temperature_A, uniform_A, ids_A, logprobs_A)
        decode_state.advance(active_A, ids_A, self._token, self._position, self._left)

    def _forward(self, size: Size) -> Tensor:
        rows, count, longest, adapted = size
        position, length, cache_slot = (x[:rows] for x in (self._position, self._length, self._cache_slot))
        table, tiles = self._table[:rows], self._slot_of_tile[: rows // TILE]
        decode_state.locate(position, self._left[:rows], table, cache_slot, length, self._store.block_size)
        active, steady = self._active[:count], self._pass.steady

        def attend(q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, scale: float, window: int | None) -> None:
            paged_attention.decode(q, cache, out, active, active, table, length, longest, scale, window, steady)

        hidden = self._pass.hidden(PassRows(self._token[:rows], position, cache_slot, tiles, attend))
        return self._pass.logits(hidden, tiles, adapted, self._logits[:rows])

    def _allocate(self, rows: int) -> None:
        self._recorder.forget()
        self._capacity = rows
        integers = partial(torch.zeros, dtype=torch.int32, device=self._device)
        self._token, self._position, self._left, self._length, self._active = (integers(rows) for _ in range(5))
        self._cache_slot = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._slot_of_tile = integers(rows // TILE)
        self._table = integers(rows, self._max_blocks)
        self._logits = torch.empty(rows, self._vocabulary, dtype=self._dtype, device=self._device)


def _round_sequences(count: int) -> int:
    return 1 << (count - 1).bit_length() if count <= TILE else rounded_rows(count)


def _round_context(tokens: int) -> int:
    return max(paged_attention.CHUNK, 1 << (tokens - 1).bit_length())
