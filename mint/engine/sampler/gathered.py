"""Keys and values of the sequences that decode, laid out one sequence after the other and kept from step to step.

On a CPU gathering them from their blocks costs about as much as the attention over them. While the same sequences go
on, a step only adds its own token to each; when one comes or goes all are gathered anew. What lies here is a copy: the
blocks stay the truth.

Shapes: N sequences, S slots of the longest, M its blocks, K key/value heads, D head size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mint.engine.sampler.cache import NULL_BLOCK
from mint.engine.sampler.paged import BlockStore

# Blocks of room for the tokens to come.
SLACK = 2
# Beyond this the copy is not worth its memory, and blocks are gathered as they are needed.
MOST_BYTES = 256 * 2**20


class Gathered:
    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._blocks: list[list[int]] = []
        self._lengths_N = np.zeros(0, dtype=np.int64)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots = 0
        self._table: Tensor | None = None  # of a step that gathers anew
        self._place_N = torch.zeros(0, dtype=torch.long)

    def begin(self, blocks: Sequence[list[int]], table_NM: np.ndarray, lengths_N: np.ndarray) -> bool:
        """Prepares a step over these sequences; False if they take too much memory."""
        size = self._store.block_size
        slots = (table_NM.shape[1] + SLACK) * size
        if len(blocks) * slots * self._store.bytes_a_token > MOST_BYTES:
            self._blocks = []
            return False
        same = len(blocks) == len(self._blocks) and all(map(operator.is_, blocks, self._blocks))
        self._table = None
        if not same or table_NM.shape[1] * size > self._slots or (lengths_N != self._lengths_N + 1).any():
            self._slots = slots
            self._table = torch.from_numpy(np.pad(table_NM, [(0, 0), (0, SLACK)], constant_values=NULL_BLOCK)).flatten()
            self._keys, self._values = [], []
        self._place_N = torch.from_numpy(np.arange(len(blocks)) * self._slots + lengths_N - 1)
        self._blocks, self._lengths_N = list(blocks), lengths_N
        return True

    def read(self, layer: int, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all sequences in a layer, [N, S, K, D] each, the tokens of this step among them."""
        if self._table is not None:  # this step's tokens are in their blocks by now
            for kept, read in zip((self._keys, self._values), self._store.read(layer, self._table), strict=True):
                kept.append(read)
        else:
            self._keys[layer].index_copy_(0, self._place_N, k_NKD)
            self._values[layer].index_copy_(0, self._place_N, v_NKD)
        rows = len(self._blocks)
        return self._keys[layer].unflatten(0, (rows, -1)), self._values[layer].unflatten(0, (rows, -1))
