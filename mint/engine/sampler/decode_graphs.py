"""Decoding steps as recorded CUDA graphs: one a size, over buffers that stay where they are.

Sizes are rounded up, so that a few graphs serve all batches: rows, sequences among them (the other rows fill tiles),
and the longest context. A size that is met for the first time is run once as it is and recorded after that.

Shapes: N rows, A sequences, M blocks of the longest sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mint.engine.kernels import decode_state, paged_attention
from mint.engine.kernels import draw as draw_kernel
from mint.engine.kernels.rows import TILE, Tables
from mint.engine.sampler.kernel_pass import KernelPass, PassRows
from mint.engine.sampler.paged import BlockStore

_FIRST_ROWS = 256

Size: TypeAlias = tuple[int, int, int, bool]
"""Rows, sequences, longest context, whether an adapter sits on the unembedding."""


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


class DecodeGraphs:
    def __init__(
        self, kernel_pass: KernelPass, store: BlockStore, vocabulary: int, max_blocks: int, fixed_rows: int | None
    ) -> None:
        """`max_blocks`: of one sequence."""
        self._pass = kernel_pass
        self._store = store
        self._vocabulary = vocabulary
        self._max_blocks = max_blocks
        self._fixed_rows = fixed_rows
        self._device, self._dtype = store.keys[0].device, store.keys[0].dtype
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._recorded_with: tuple[Tables, int] | None = None
        self._pool: Any = None
        self._capacity = 0

    def load(self, batch: Batch, tables: Tables) -> Size:
        """Puts the batch into the buffers; its size."""
        rows = _round_rows(len(batch.slot_of_tile) * TILE, self._fixed_rows)
        count = len(batch.place_A)
        size = rows, min(rows, _round_sequences(count)), _round_context(batch.longest), batch.adapted
        if rows > self._capacity:
            self._allocate(max(rows, _FIRST_ROWS, 2 * self._capacity))
        if self._recorded_with != (tables, self._store.keys[0].data_ptr()):
            self._forget_graphs()
            self._recorded_with = tables, self._store.keys[0].data_ptr()
        numbers = np.zeros((3, rows), dtype=np.int32)
        numbers[:, batch.place_A] = batch.token_A, batch.position_A, batch.left_A
        for buffer, values in zip((self._token, self._position, self._left), torch.from_numpy(numbers), strict=True):
            buffer[:rows].copy_(values)
        active = np.full(size[1], -1, dtype=np.int32)
        active[:count] = batch.place_A
        self._active[: size[1]].copy_(torch.from_numpy(active))
        tiles = np.zeros(rows // TILE, dtype=np.int32)
        tiles[: len(batch.slot_of_tile)] = batch.slot_of_tile
        self._slot_of_tile[: len(tiles)].copy_(torch.from_numpy(tiles))
        table = np.zeros((rows, batch.table_AM.shape[1]), dtype=np.int32)
        table[batch.place_A] = batch.table_AM
        self._table[:rows, : table.shape[1]].copy_(torch.from_numpy(table))
        return size

    def logits(self, size: Size) -> Tensor:
        """[rows, V] of the batch's next tokens, their keys and values now in the cache. Overwritten by the next."""
        graph = self._graphs.get(size)
        if graph is None:
            self._forward(size)
            if self._device.type == "cuda":
                self._graphs[size] = self._record(size)
        else:
            graph.replay()
        return self._logits[: size[0]]

    def draw(self, size: Size, temperature_A: Tensor, uniform_A: Tensor, ids_A: Tensor, logprobs_A: Tensor) -> None:
        """Draws from the last logits, and moves every sequence on to the token it drew."""
        active_A = self._active[: size[1]]
        draw_kernel.draw(self._logits[: size[0]], active_A, temperature_A, uniform_A, ids_A, logprobs_A)
        decode_state.advance(active_A, ids_A, self._token, self._position, self._left)

    def _forward(self, size: Size) -> None:
        rows, count, longest, adapted = size
        position, length, cache_slot = (x[:rows] for x in (self._position, self._length, self._cache_slot))
        table, tiles = self._table[:rows], self._slot_of_tile[: rows // TILE]
        decode_state.locate(position, self._left[:rows], table, cache_slot, length, self._store.block_size)
        active = self._active[:count]

        def attend(q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, scale: float, window: int | None) -> None:
            paged_attention.decode(q, cache, out, active, active, table, length, longest, scale, window)

        hidden = self._pass.hidden(PassRows(self._token[:rows], position, cache_slot, tiles, attend))
        self._pass.logits(hidden, tiles, adapted, self._logits[:rows])

    def _record(self, size: Size) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool):
            self._forward(size)
        return graph

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._pool = None  # the memory went with the last of them

    def _allocate(self, rows: int) -> None:
        self._forget_graphs()
        self._capacity = rows
        integers = partial(torch.zeros, dtype=torch.int32, device=self._device)
        self._token, self._position, self._left, self._length, self._active = (integers(rows) for _ in range(5))
        self._cache_slot = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._slot_of_tile = integers(rows // TILE)
        self._table = integers(rows, self._max_blocks)
        self._logits = torch.empty(rows, self._vocabulary, dtype=self._dtype, device=self._device)


def _round_rows(rows: int, fixed: int | None) -> int:
    step = fixed or (TILE if rows <= 64 else 32 if rows <= 128 else 64 if rows <= 512 else 256)
    return -(-rows // step) * step


def _round_sequences(count: int) -> int:
    return 1 << (count - 1).bit_length() if count <= TILE else _round_rows(count, None)


def _round_context(tokens: int) -> int:
    return max(paged_attention.CHUNK, 1 << (tokens - 1).bit_length())
