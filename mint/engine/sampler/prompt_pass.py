"""Steps that read prompts, whoever decodes beside them included: one pass over packed rows.

Steps of moderate size are recorded (`recorder`), over buffers that stay where they are: launching their kernels takes
the host longer than running them the device. Larger ones are launched as they come.

Shapes: N rows, T tokens, A sequences that decode, L lines of the block tables, M blocks of the longest, S tiles of
queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mint.engine.kernels import paged_attention
from mint.engine.kernels.low_rank import TILE, Tables
from mint.engine.sampler.kernel_pass import KernelPass, PassRows, rounded_rows
from mint.engine.sampler.paged import BlockStore
from mint.engine.sampler.recorder import Recorder
from mint.engine.sampler.scheduler import Work
from mint.engine.sampler.transfer import put, to_device

# Up to here launching takes longer than computing, for the smaller models at least.
_MOST_ROWS = 4096
# Recording takes as long as some four launches.
_RECORDED_AFTER = 3
_MOST_LINES = 1024


class Size(NamedTuple):
    rows: int
    decoding: int
    tiles: int
    longest: int
    """Tokens of the longest context, where somebody decodes."""
    joined: int | None
    """As in `PassRows`."""


@dataclass(frozen=True)
class Step:
    """A step on the host: rows, what each reads and where its keys and values go, and who looks at what."""

    token_N: np.ndarray
    position_N: np.ndarray
    cache_slot_N: np.ndarray
    slot_of_tile: np.ndarray
    decoding_2A: np.ndarray
    """Row and line of the block tables."""
    tile_S4: np.ndarray
    """First row, rows, position of the first, line."""
    table_LM: np.ndarray
    length_L: np.ndarray
    joined: int | None

    @property
    def size(self) -> Size:
        """Rounded, so that few sizes serve all steps."""
        decoding = self.decoding_2A.shape[1]
        longest = 1 << (int(self.length_L.max()) - 1).bit_length() if decoding else 0
        rows, tiles = rounded_rows(len(self.token_N)), _power_of_two(len(self.tile_S4))
        return Size(rows, _power_of_two(decoding), tiles, longest, self.joined)


class PromptPass:
    def __init__(self, kernel_pass: KernelPass, store: BlockStore, max_blocks: int) -> None:
        """`max_blocks`: of one sequence."""
        self._pass = kernel_pass
        self._store = store
        self._max_blocks = max_blocks
        self._device = store.keys[0].device
        self._recorder = Recorder(store, after=_RECORDED_AFTER)
        self._allocated = False

    def hidden(
        self, works: list[Work], place_T: np.ndarray, slot_of_tile: np.ndarray, joined: int | None, tables: Tables
    ) -> Tensor:
        """The final hidden states [N, H] of the works' tokens, each at its place; their keys and values are in the
        cache. Overwritten by the next."""
        step = _layout(works, place_T, slot_of_tile, joined, self._store.block_size)
        size = step.size
        if size.rows > _MOST_ROWS or len(works) > _MOST_LINES:
            return self._run_at_once(step)
        self._put(step, size)
        self._recorder.check(tables)
        return self._recorder.run(size, partial(self._forward, size))

    def _run_at_once(self, step: Step) -> Tensor:
        on_device = partial(to_device, device=self._device)
        return self._compute(
            on_device(step.token_N), on_device(step.position_N), on_device(step.cache_slot_N),
            on_device(step.slot_of_tile), on_device(step.decoding_2A), on_device(step.tile_S4),
            on_device(step.table_LM), on_device(step.length_L), int(step.length_L.max()), step.joined,
        )  # fmt: skip

    def _forward(self, size: Size) -> Tensor:
        rows, decoding, tiles, longest, joined = size
        return self._compute(
            self._token[:rows], self._position[:rows], self._cache_slot[:rows], self._slot_of_tile[: rows // TILE],
            self._decoding[:, :decoding], self._tiles[:tiles], self._table, self._length, longest, joined,
        )  # fmt: skip

    def _compute(
        self, token_N: Tensor, position_N: Tensor, cache_slot_N: Tensor, slot_of_tile: Tensor, decoding_2A: Tensor,
        tile_S4: Tensor, table_LM: Tensor, length_L: Tensor, longest: int, joined: int | None,
    ) -> Tensor:  # fmt: skip
        row_A, line_A = decoding_2A

        def attend(q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor, scale: float, window: int | None) -> None:
            if len(row_A):
                steady = self._pass.steady
                paged_attention.decode(q, cache, out, row_A, line_A, table_LM, length_L, longest, scale, window, steady)
            if len(tile_S4):
                paged_attention.span(q, cache, out, tile_S4, table_LM, scale, window)

        return self._pass.hidden(PassRows(token_N, position_N, cache_slot_N, slot_of_tile, joined, attend))

    def _put(self, step: Step, size: Size) -> None:
        """Into the buffers; what only rounds a size up computes something and leaves nothing."""
        if not self._allocated:
            self._allocate()
        put(_filled(step.token_N, size.rows, 0), self._token[: size.rows])
        put(_filled(step.position_N, size.rows, 0), self._position[: size.rows])
        put(_filled(step.cache_slot_N, size.rows, -1), self._cache_slot[: size.rows])
        put(_filled(step.slot_of_tile, size.rows // TILE, 0), self._slot_of_tile[: size.rows // TILE])
        for values, buffer in zip(step.decoding_2A, self._decoding, strict=True):
            put(_filled(values, size.decoding, -1), buffer[: size.decoding])
        put(_filled(step.tile_S4, size.tiles, 0), self._tiles[: size.tiles])
        lines, width = step.table_LM.shape
        self._table[:lines, :width].copy_(to_device(step.table_LM, self._device))
        put(step.length_L, self._length[:lines])

    def _allocate(self) -> None:
        integers = partial(torch.zeros, dtype=torch.int32, device=self._device)
        self._token, self._position = integers(_MOST_ROWS), integers(_MOST_ROWS)
        self._cache_slot = torch.zeros(_MOST_ROWS, dtype=torch.int64, device=self._device)
        self._slot_of_tile = integers(_MOST_ROWS // TILE)
        self._decoding = integers(2, _MOST_ROWS)
        self._tiles = integers(_MOST_ROWS, 4)
        self._table, self._length = integers(_MOST_LINES, self._max_blocks), integers(_MOST_LINES)
        self._allocated = True


def _layout(
    works: list[Work], place_T: np.ndarray, slot_of_tile: np.ndarray, joined: int | None, block_size: int
) -> Step:
    rows = len(slot_of_tile) * TILE
    counts = np.array([work.count for work in works])
    firsts = np.array([work.sequence.computed for work in works])
    starts = np.cumsum(counts) - counts
    line_T = np.repeat(np.arange(len(works)), counts)
    position_T = np.arange(len(place_T)) - np.repeat(starts - firsts, counts)
    table_LM = block_tables([work.sequence.blocks for work in works])
    token_N, position_N = np.zeros((2, rows), dtype=np.int32)
    cache_slot_N = np.full(rows, -1, dtype=np.int64)
    token_N[place_T] = [t for work in works for t in _tokens(work)]
    position_N[place_T] = position_T
    blocks_T = table_LM[line_T, position_T // block_size].astype(np.int64)
    cache_slot_N[place_T] = blocks_T * block_size + position_T % block_size
    decoding: list[tuple[int, int]] = []
    tiles: list[tuple[int, int, int, int]] = []
    for line, (work, row) in enumerate(zip(works, place_T[starts].tolist(), strict=True)):
        if work.sequence.drawn and work.count == 1:
            decoding.append((row, line))
        else:
            tiles += _query_tiles(row, work.count, work.sequence.computed, line)
    return Step(
        token_N, position_N, cache_slot_N, slot_of_tile,
        np.array(decoding, dtype=np.int32).reshape(-1, 2).T.copy(), np.array(tiles, dtype=np.int32).reshape(-1, 4),
        table_LM, (firsts + counts).astype(np.int32), joined,
    )  # fmt: skip


def block_tables(blocks: list[list[int]]) -> np.ndarray:
    """A line each, filled up with zeros."""
    table_LM = np.zeros((len(blocks), max(map(len, blocks))), dtype=np.int32)
    for line, held in enumerate(blocks):
        table_LM[line, : len(held)] = held
    return table_LM


def _tokens(work: Work) -> list[int]:
    first = work.sequence.computed
    return work.sequence.tokens[first : first + work.count]


def _query_tiles(row: int, count: int, position: int, line: int) -> Iterator[tuple[int, int, int, int]]:
    step = paged_attention.SPAN
    for start in range(0, count, step):
        yield row + start, min(step, count - start), position + start, line


def _filled(values: np.ndarray, count: int, filling: int) -> np.ndarray:
    """As many as the buffer's part holds."""
    filled = np.full((count, *values.shape[1:]), filling, dtype=values.dtype)
    filled[: len(values)] = values
    return filled


def _power_of_two(count: int) -> int:
    """Not below it; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count else 0
