"""The block tables of a step's sequences as one array, kept from step to step: most steps change a few cells."""

from __future__ import annotations

import operator

import numpy as np

from mint.engine.sampler.cache import NULL_BLOCK


class BlockTables:
    def __init__(self) -> None:
        self._blocks: list[list[int]] = []
        self._lasts: list[int] = []
        self._table_NM = np.zeros((0, 0), dtype=np.int64)

    def update(self, blocks: list[list[int]], width: int = 0) -> np.ndarray:
        """The sequences' tables, filled up with the null block, at least `width` wide."""
        # While a sequence keeps its list, only the last block is ever new (or replaced by a copy of its own).
        lasts = [held[-1] for held in blocks]
        longest = max(width, *map(len, blocks))
        same = len(blocks) == len(self._blocks) and all(map(operator.is_, blocks, self._blocks))
        if not same or longest > self._table_NM.shape[1]:
            self._table_NM = np.full((len(blocks), 2 * longest), NULL_BLOCK, dtype=np.int64)
            for row, held in enumerate(blocks):
                self._table_NM[row, : len(held)] = held
        elif lasts != self._lasts:
            for row, held in enumerate(blocks):
                self._table_NM[row, len(held) - 1] = held[-1]
        self._blocks, self._lasts = blocks, lasts
        return self._table_NM
