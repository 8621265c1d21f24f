"""The state of sequences that decode, moved on from step to step without the host: token, position, cache slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _locate_kernel(
    position_ptr, left_ptr, table_ptr, cache_slot_ptr, length_ptr, source_ptr, turn_ptr, table_width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position = tl.load(position_ptr + row)
    block = tl.load(table_ptr + row.to(tl.int64) * table_width + position // BLOCK)
    place = block.to(tl.int64) * BLOCK + position % BLOCK
    left = tl.load(left_ptr + row)
    tl.store(cache_slot_ptr + row, tl.where(left > 0, place, -1))
    tl.store(length_ptr + row, position + 1)
    tl.store(source_ptr + row, tl.where(left > 0, row, -1))
    if row == 0:
        tl.store(turn_ptr, tl.load(turn_ptr) + 1)


@triton.jit
def advance(row, token, token_ptr, position_ptr, left_ptr):
    """The token a row has just drawn is read next, one place further on."""
    left = tl.load(left_ptr + row) - 1
    tl.store(left_ptr + row, left)
    # Who has drawn all it may stays where it is: there is no block for the next place.
    tl.store(position_ptr + row, tl.load(position_ptr + row) + tl.where(left > 0, 1, 0))
    tl.store(token_ptr + row, token)


def locate(
    position_N: Tensor, left_N: Tensor, table_NM: Tensor, cache_slot_N: Tensor, length_N: Tensor, source_N: Tensor,
    turn: Tensor, block_size: int,
) -> None:  # fmt: skip
    """Where each row's token goes in the cache and whether it draws (-1 for both: it has nothing left to draw), how
    many tokens it looks at, and the number of the turn."""
    _locate_kernel[(len(position_N),)](
        position_N, left_N, table_NM, cache_slot_N, length_N, source_N, turn, table_NM.shape[1], BLOCK=block_size,
        num_warps=1,
    )  # fmt: skip
