"""Decoding steps as recorded CUDA graphs: one a size, over buffers that stay where they are.

A graph reads every row's token, draws the next one and moves the row on to it, so that several steps need nothing of
the host. Sizes are rounded up, so that a few graphs serve all batches: rows, sequences among them (the other rows fill
tiles), and the longest context.

Shapes: N rows, A sequences, M blocks of the longest sequence, S steps, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mint.engine.kernels import decode_state, paged_attention
from mint.engine.kernels.draw import Draws, State, draw
from mint.engine.kernels.filters import Filters
from mint.engine.kernels.low_rank import TILE, Tables
from mint.engine.sampler.kernel_pass import KernelPass, PassRows, rounded_rows
from mint.engine.sampler.logits import DrawParams
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
    joined: int | None
    """As in `PassRows`."""


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
    joined: int | None
    """As in `PassRows`."""
    draws: DrawParams
    """How each draws."""


@dataclass(frozen=True)
class Rest:
    """Those of a batch that go on after as many steps as each of them was given; columns as in the batch."""

    slot_of_tile: np.ndarray
    left_A: np.ndarray
    """0: it does not go on."""
    table_AM: np.ndarray
    longest: int
    joined: int | None


class DecodeGraphs:
    def __init__(
        self, kernel_pass: KernelPass, store: BlockStore, vocabulary: int, max_blocks: int, most_steps: int
    ) -> None:
        """`max_blocks`: of one sequence. `most_steps`: of one burst."""
        self._pass = kernel_pass
        self._store = store
        self._vocabulary = vocabulary
        self._max_blocks = max_blocks
        self._most_steps = most_steps
        self._device, self._dtype = store.keys[0].device, store.keys[0].dtype
        self._recorder = Recorder(store, after=1)  # the next step is of the same size
        self._capacity = 0
        self._size = Size(0, 0, 0, False, None)
        self._places = np.zeros(0, dtype=np.int64)

    def load(self, batch: Batch, tables: Tables) -> Size:
        """Puts the batch into the buffers; its size."""
        rows = rounded_rows(len(batch.slot_of_tile) * TILE)
        count = len(batch.place_A)
        sequences, longest = min(rows, _round_sequences(count)), _round_context(batch.longest)
        size = Size(rows, sequences, longest, batch.adapted, batch.joined)
        if rows > self._capacity:
            self._allocate(max(rows, _FIRST_ROWS, 2 * self._capacity))
        self._recorder.check(tables)
        self._size, self._places = size, batch.place_A
        numbers = np.zeros((3, rows), dtype=np.int32)
        numbers[:, batch.place_A] = batch.token_A, batch.position_A, batch.left_A
        for buffer, values in zip((self._token, self._position, self._left), numbers, strict=True):
            put(values, buffer[:rows])
        self._put_draws(batch.draws, rows)
        self._put_lines(batch.slot_of_tile, batch.left_A, batch.table_AM)
        return size

    def put_tokens(self, rows: np.ndarray, ids: Tensor) -> None:
        """What rows of the batch read first, where the host has not seen it yet."""
        self._token.index_copy_(0, to_device(rows, self._device), ids.to(self._token.dtype))

    def go_on(self, rest: Rest, tables: Tables) -> Size:
        """For more tokens of the batch, from those it has drawn."""
        self._recorder.check(tables)
        size = self._size = self._size._replace(longest=_round_context(rest.longest), joined=rest.joined)
        left = np.zeros(size.rows, dtype=np.int32)
        left[self._places] = rest.left_A
        put(left, self._left[: size.rows])
        # At the end of its steps a sequence stands at the last token it read.
        self._position[: size.rows].add_(self._left[: size.rows] > 0)
        self._put_lines(rest.slot_of_tile, rest.left_A, rest.table_AM)
        return size

    def _put_draws(self, draws: DrawParams, rows: int) -> None:
        numbers = np.zeros((3, rows), dtype=np.float32)
        numbers[:, self._places] = draws.temperature_N, draws.top_p_N, draws.min_p_N
        top_k = np.zeros(rows, dtype=np.int32)
        top_k[self._places] = draws.top_k_N
        put(top_k, self._top_k[:rows])
        for buffer, values in zip((self._temperature, self._top_p, self._min_p), numbers, strict=True):
            put(values, buffer[:rows])

    def _put_lines(self, slot_of_tile: np.ndarray, left_A: np.ndarray, table_AM: np.ndarray) -> None:
        rows, sequences = self._size[:2]
        active = np.full(sequences, -1, dtype=np.int32)
        active[: len(left_A)] = np.where(left_A > 0, self._places, -1)
        put(active, self._active[:sequences])
        tiles = np.zeros(rows // TILE, dtype=np.int32)
        tiles[: len(slot_of_tile)] = slot_of_tile
        put(tiles, self._slot_of_tile[: len(tiles)])
        table = np.zeros((rows, table_AM.shape[1]), dtype=np.int32)
        table[self._places] = table_AM
        self._table[:rows, : table.shape[1]].copy_(to_device(table, self._device))

    def draw(self, size: Size, uniform_SN: np.ndarray, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
        """As many tokens of every row as there are uniform numbers for it: their ids and log-probs [S, N], to be
        copied before the next. `whole`: the logits of the last step [N, V] are wanted as well, or filters of them."""
        steps = len(uniform_SN)
        put(uniform_SN, self._of_steps(self._uniform, size.rows)[:steps])
        self._turn.fill_(-1)  # every step begins with counting itself
        for _ in range(steps):
            logits = self._recorder.run((size, whole), partial(self._forward, size, whole))
        ids, logprobs = (self._of_steps(buffer, size.rows)[:steps] for buffer in (self._ids, self._logprobs))
        return ids, logprobs, logits

    def _forward(self, size: Size, whole: bool) -> Tensor:
        rows, count, longest, adapted, joined = size
        position, length, cache_slot = (x[:rows] for x in (self._position, self._length, self._cache_slot))
        table, tiles, left = self._table[:rows], self._slot_of_tile[: rows // TILE], self._left[:rows]
        token, source = self._token[:rows], self._source[:rows]
        decode_state.locate(position, left, table, cache_slot, length, source, self._turn, self._store.block_size)
        active, steady = self._active[:count], self._pass.steady

        def attend(q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, scale: float, window: int | None) -> None:
            paged_attention.decode(q, cache, out, active, active, table, length, longest, scale, window, steady)

        hidden = self._pass.hidden(PassRows(token, position, cache_slot, tiles, joined, attend))
        uniform, ids, logprobs = (self._of_steps(x, rows) for x in (self._uniform, self._ids, self._logprobs))
        draws = Draws(source, self._temperature[:rows], uniform, ids, logprobs, self._turn)
        state = State(token, position, left)
        if whole:
            logits = self._pass.logits(hidden, tiles, adapted, joined, self._logits)
            filters = Filters(self._top_k[:rows], self._top_p[:rows], self._min_p[:rows])
            draw(logits, replace(draws, filters=filters), None, state)
        else:
            logits, low_rank = self._pass.unembed(hidden, tiles, adapted, joined, self._logits)
            draw(logits, draws, low_rank, state)
        return logits

    def _of_steps(self, buffer: Tensor, rows: int) -> Tensor:
        return buffer[: self._most_steps * rows].view(self._most_steps, rows)

    def _allocate(self, rows: int) -> None:
        self._recorder.forget()
        self._capacity = rows
        integers = partial(torch.zeros, dtype=torch.int32, device=self._device)
        self._token, self._position, self._left, self._length, self._active = (integers(rows) for _ in range(5))
        self._cache_slot = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._source, self._top_k, self._turn = integers(rows), integers(rows), integers(1)
        self._slot_of_tile = integers(rows // TILE)
        self._table = integers(rows, self._max_blocks)
        self._logits = torch.empty(rows * self._vocabulary, dtype=self._dtype, device=self._device)
        numbers = partial(torch.zeros, dtype=torch.float32, device=self._device)
        self._temperature, self._top_p, self._min_p = (numbers(rows) for _ in range(3))
        self._uniform, self._logprobs = (numbers(self._most_steps * rows) for _ in range(2))
        self._ids = torch.zeros(self._most_steps * rows, dtype=torch.int64, device=self._device)


def _round_sequences(count: int) -> int:
    return 1 << (count - 1).bit_length() if count <= TILE else rounded_rows(count)


def _round_context(tokens: int) -> int:
    return max(paged_attention.CHUNK, 1 << (tokens - 1).bit_length())
