"""Draws over large vocabularies: one pass over the logits, then one small program a draw.

The draw is that of `mint.engine.sampler.logits.draw`: it inverts the cumulative distribution, in the order of token
ids, at one uniform number. The first kernel sums pieces of the vocabulary, tempered and not; the last finds the piece
and the token in it, and the token's untempered log-prob. Sums are of fixed pieces, so rows do not depend on each other.
Between the two, `filters` finds what top-k, top-p and min-p leave, where somebody asked for them.

The low-rank part of the unembedding can be added on the way, instead of in a pass of its own.

Shapes: M draws from N rows of logits, V vocabulary, P pieces of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.kernels.decode_state import advance
from mint.engine.kernels.filters import Filters, filtered, ordered
from mint.engine.kernels.low_rank import RANK_STEP, TILE, Adapters, adapter_at, b_step, expanded, y_step
from mint.engine.kernels.overlap import follow, overlapping

PIECE = 256
# Pieces a program takes, and from how many draws on: fewer leave it too few programs.
_RUN = 9
_MANY_DRAWS = 256
# A draw's statistics of a piece: peak, sum, tempered sum, place of the peak.
_STATS = tl.constexpr(4)


@dataclass(frozen=True)
class Draws:
    """M draws."""

    source_M: Tensor
    """The row of logits of each; -1: none."""
    temperature_M: Tensor
    uniform_SM: Tensor
    """Uniform numbers of the draws of several turns..."""
    ids_SM: Tensor
    logprobs_SM: Tensor
    """...and what they find."""
    turn: Tensor
    """The number of this one, [1]."""
    filters: Filters | None = None


@dataclass(frozen=True)
class LowRank:
    """What is to be added to the logits of each row; draw m must be from row m, or from none."""

    y: Tensor
    """[splits, N, 1, rank]"""
    adapters: Adapters
    linear: int


@dataclass(frozen=True)
class State:
    """Rows that go on with what they drew; draw m must be row m's."""

    token_N: Tensor
    position_N: Tensor
    left_N: Tensor


@triton.jit
def _piece_kernel(
    logits_ptr, logits_row, source_ptr, temperature_ptr, stats_ptr, y_ptr, y_split, y_row, slot_of_tile, b_table,
    rank_table, scale_table, table_width, linear_number, draws, vocabulary, pieces,
    ADAPTED: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, RUN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A program takes RUN pieces one after the other, the next ones' numbers on their way meanwhile."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    source = tl.load(source_ptr + m, mask=m < draws, other=-1)
    given = tl.load(temperature_ptr + m, mask=m < draws, other=1.0)
    temperature = tl.maximum(given, 1.1754944e-38)
    drawn = source >= 0
    row = logits_ptr + tl.maximum(source, 0).to(tl.int64)[:, None] * logits_row
    greedy, tempers = tl.min(given, axis=0) == 0.0, tl.max(tl.abs(temperature - 1.0), axis=0) > 0.0
    if ADAPTED:
        slot = tl.load(slot_of_tile + tl.program_id(0)).to(tl.int64)
        rank, scale, b_ptr = adapter_at(slot, linear_number, b_table, rank_table, scale_table, table_width, logits_ptr)
        y_of = tl.minimum(m, draws - 1)
    follow(OVERLAPS)
    if tl.max(source, axis=0) >= 0:
        if ADAPTED:
            first_y = y_step(y_ptr, y_split, y_row, 0, rank, y_of, SPLITS)
        first = tl.program_id(1) * RUN
        for piece in tl.range(first, tl.minimum(first + RUN, pieces), num_stages=3):
            i = piece * PIECE + tl.arange(0, PIECE)
            inside = i < vocabulary
            logit = tl.load(row + i[None, :], mask=inside[None, :] & drawn[:, None], other=0.0).to(tl.float32)
            if ADAPTED:
                b = b_step(b_ptr, 0, rank, i, vocabulary, RANK_STEP)
                logit += expanded(
                    y_ptr, y_split, y_row, rank, scale, b_ptr, first_y, b, y_of, i, vocabulary, SPLITS, ROWS, PIECE
                )
                logit = logit.to(logits_ptr.dtype.element_ty).to(tl.float32)
            logit = tl.where(inside[None, :], logit, float("-inf"))
            peak = tl.max(logit, axis=1)
            safe = tl.where(peak == float("-inf"), 0.0, peak)
            place = tl.zeros([ROWS], dtype=tl.int32)
            if greedy:
                place = tl.min(tl.where(logit == peak[:, None], i[None, :], vocabulary), axis=1)
            total = tl.sum(tl.exp(logit - safe[:, None]), axis=1)
            tempered = total
            if tempers:
                tempered = tl.sum(tl.exp((logit - safe[:, None]) / temperature[:, None]), axis=1)
            out = stats_ptr + (m.to(tl.int64) * pieces + piece) * _STATS
            tl.store(out, peak, mask=drawn)
            tl.store(out + 1, total, mask=drawn)
            tl.store(out + 2, tempered, mask=drawn)
            tl.store(out + 3, place.to(tl.float32), mask=drawn)


@triton.jit
def _token_kernel(
    logits_ptr, logits_row, source_ptr, temperature_ptr, uniform_ptr, turn_ptr, stats_ptr, id_ptr, logprob_ptr, y_ptr,
    y_split, y_row, slot_of_tile, b_table, rank_table, scale_table, table_width, linear_number,
    cut_ptr, tie_ptr, kept_ptr, min_p_ptr, token_ptr, position_ptr, left_ptr, draws, vocabulary, pieces,
    ADAPTED: tl.constexpr, FILTERED: tl.constexpr, ADVANCES: tl.constexpr, SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr, PIECES_UP: tl.constexpr, PIECE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    source = tl.load(source_ptr + m).to(tl.int64)
    given = tl.load(temperature_ptr + m)
    turn = tl.load(turn_ptr)
    if ADAPTED:
        slot = tl.load(slot_of_tile + m // TILE_ROWS).to(tl.int64)
        rank, scale, b_ptr = adapter_at(slot, linear_number, b_table, rank_table, scale_table, table_width, logits_ptr)
    follow(OVERLAPS)
    if source >= 0:
        p = tl.arange(0, PIECES_UP)
        here = p < pieces
        stats = stats_ptr + (m.to(tl.int64) * pieces + p) * _STATS
        peaks = tl.load(stats, mask=here, other=float("-inf"))
        peak = tl.max(peaks, axis=0)
        temperature = tl.maximum(given, 1.1754944e-38)
        sums = tl.load(stats + 1, mask=here, other=0.0) * tl.exp(peaks - peak)
        normalizer = peak + tl.log(tl.sum(sums, axis=0))
        if FILTERED:
            # What lies above the cut, and of those at it as many as are kept, the first of them.
            kept = kept_ptr + (m.to(tl.int64) * pieces + p) * 2
            ties = tl.load(kept + 1, mask=here, other=0.0)
            ties_before = tl.cumsum(ties, axis=0) - ties
            quota = tl.load(cut_ptr + m * 2 + 1)
            kept_ties = tl.minimum(tl.maximum(quota.to(tl.float32) - ties_before, 0.0), ties)
            tempered = tl.load(kept, mask=here, other=0.0) + kept_ties * tl.load(tie_ptr + m)
        else:
            tempered = tl.load(stats + 2, mask=here, other=0.0) * tl.exp((peaks - peak) / temperature)
            tempered = tl.where(here & (peaks > float("-inf")), tempered, 0.0)
        cumulative = tl.cumsum(tempered, axis=0)
        target = tl.load(uniform_ptr + turn * draws + m) * tl.sum(tempered, axis=0)
        # The first piece whose end lies beyond the target; by rounding there may be none, then the last with any mass.
        beyond = tl.min(tl.where((cumulative > target) & (tempered > 0), p, PIECES_UP), axis=0)
        last = tl.max(tl.where(tempered > 0, p, 0), axis=0)
        piece = tl.where(beyond < PIECES_UP, beyond, last)
        before = tl.sum(tl.where(p < piece, tempered, 0.0), axis=0)
        i = piece * PIECE + tl.arange(0, PIECE)
        logit = tl.load(logits_ptr + source * logits_row + i, mask=i < vocabulary, other=0.0).to(tl.float32)
        if ADAPTED:
            low = tl.zeros([PIECE], dtype=tl.float32)
            for start in range(0, rank, RANK_STEP):
                b = b_step(b_ptr, start, rank, i, vocabulary, RANK_STEP)
                y = y_step(y_ptr, y_split, y_row, start, rank, source + tl.arange(0, 1), SPLITS)
                y = y.to(b.dtype).to(tl.float32)
                low += tl.sum(b.to(tl.float32) * tl.trans(y), axis=0)
            logit = (logit + scale * low).to(logits_ptr.dtype.element_ty).to(tl.float32)
        mass = tl.where(i < vocabulary, tl.exp((logit - peak) / temperature), 0.0)
        if FILTERED:
            key, cut = ordered(logit, logits_ptr), tl.load(cut_ptr + m * 2).to(tl.uint32, bitcast=True)
            tied = ((key == cut) & (i < vocabulary)).to(tl.int32)
            rank_of_tie = tl.cumsum(tied, axis=0) - tied + tl.sum(tl.where(p < piece, ties, 0.0), axis=0).to(tl.int32)
            keeps = ((key > cut) | ((tied > 0) & (rank_of_tie < quota))) & (mass >= tl.load(min_p_ptr + m))
            mass = tl.where(keeps, mass, 0.0)
        inside = tl.cumsum(mass, axis=0)
        found = tl.min(tl.where((inside > target - before) & (mass > 0), i, vocabulary), axis=0)
        end = tl.max(tl.where(mass > 0, i, 0), axis=0)
        token = tl.where(found < vocabulary, found, end)
        best = tl.min(tl.where(peaks == peak, tl.load(stats + 3, mask=here, other=0.0), vocabulary), axis=0)
        chosen = tl.sum(tl.where(i == token, logit, 0.0), axis=0)
        chosen = tl.where(given == 0, peak, chosen)
        token = tl.where(given == 0, best.to(tl.int32), token)
        token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
        tl.store(id_ptr + turn * draws + m, token.to(tl.int64))
        tl.store(logprob_ptr + turn * draws + m, chosen - normalizer)
        if ADVANCES:
            advance(m, token, token_ptr, position_ptr, left_ptr)


def draw(logits_NV: Tensor, draws: Draws, low_rank: LowRank | None = None, state: State | None = None) -> None:
    """Fills in the ids and log-probs of one turn. With filters, the logits must be whole: no `low_rank`."""
    count, vocabulary, device = len(draws.source_M), logits_NV.shape[1], logits_NV.device
    pieces = triton.cdiv(vocabulary, PIECE)
    stats = torch.empty(count, pieces, 4, dtype=torch.float32, device=device)
    low: tuple[Any, ...] = (stats, 0, 0, stats, stats, stats, stats, 0, 0)
    if low_rank is not None:
        tables = low_rank.adapters.tables
        low = (
            low_rank.y, *low_rank.y.stride()[:2], low_rank.adapters.slot_of_tile, tables.b, tables.rank, tables.scale,
            tables.linears, low_rank.linear,
        )  # fmt: skip
    adapts = {"ADAPTED": low_rank is not None, "SPLITS": 1 if low_rank is None else len(low_rank.y)}
    row = logits_NV.stride(0)
    run = _RUN if count >= _MANY_DRAWS else 1
    _piece_kernel[(triton.cdiv(count, TILE), triton.cdiv(pieces, run))](
        logits_NV, row, draws.source_M, draws.temperature_M, stats, *low, count, vocabulary, pieces, **adapts,
        ROWS=TILE, PIECE=PIECE, RUN=run, num_warps=4, **overlapping(device),
    )  # fmt: skip
    found: tuple[Tensor, ...] = (stats, stats, stats, stats)
    if draws.filters is not None:
        assert low_rank is None
        found = filtered(logits_NV, draws.source_M, draws.temperature_M, draws.filters, stats, PIECE)
    onward = (stats, stats, stats) if state is None else (state.token_N, state.position_N, state.left_N)
    _token_kernel[(count,)](
        logits_NV, row, draws.source_M, draws.temperature_M, draws.uniform_SM, draws.turn, stats, draws.ids_SM,
        draws.logprobs_SM, *low, *found, *onward, count, vocabulary, pieces, **adapts,
        FILTERED=draws.filters is not None, ADVANCES=state is not None, TILE_ROWS=TILE,
        PIECES_UP=triton.next_power_of_2(pieces), PIECE=PIECE, num_warps=4, **overlapping(device),
    )  # fmt: skip
