"""The state of sequences that decode, moved on from step to step without the host: token, position, cache slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _locate_kernel(position_ptr, left_ptr, table_ptr, cache_slot_ptr, length_ptr, table_width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    position = tl.load(position_ptr + row)
    block = tl.load(table_ptr + row.to(tl.int64) * table_width + position // BLOCK)
    place = block.to(tl.int64) * BLOCK + position % BLOCK
    tl.store(cache_slot_ptr + row, tl.where(tl.load(left_ptr + row) > 0, place, -1))
    tl.store(length_ptr + row, position + 1)


@triton.jit
def _advance_kernel(active_ptr, id_ptr, token_ptr, position_ptr, left_ptr):
    place = tl.program_id(0)
    row = tl.load(active_ptr + place)
    if row >= 0:
        left = tl.load(left_ptr + row) - 1
        tl.store(left_ptr + row, left)
        # Who has drawn all it may stays where it is: there is no block for the next place.
        tl.store(position_ptr + row, tl.load(position_ptr + row) + tl.where(left > 0, 1, 0))
        tl.store(token_ptr + row, tl.load(id_ptr + place))


def locate(
    position_N: Tensor, left_N: Tensor, table_NM: Tensor, cache_slot_N: Tensor, length_N: Tensor, block_size: int
) -> None:
    """Where each row's token goes in the cache (-1: it has nothing left to draw) and how many tokens it looks at."""
    _locate_kernel[(len(position_N),)](
        position_N, left_N, table_NM, cache_slot_N, length_N, table_NM.shape[1], BLOCK=block_size, num_warps=1
    )


def advance(active_A: Tensor, ids_A: Tensor, token_N: Tensor, position_N: Tensor, left_N: Tensor) -> None:
    """The tokens just drawn are read next, one place further on."""
    _advance_kernel[(len(active_A),)](active_A, ids_A, token_N, position_N, left_N, num_warps=1)
