"""Draws over large vocabularies: one pass over the logits, then one small program a row.

The draw is that of `mint.engine.sampler.logits.draw`: it inverts the cumulative distribution, in the order of token
ids, at one uniform number. The first kernel sums pieces of the vocabulary, tempered and not; the second finds the piece
and the token in it, and the token's untempered log-prob. Sums are of fixed pieces, so rows do not depend on each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 4096
# A row's statistics of a piece: peak, sum, tempered sum, place of the peak.
_STATS = tl.constexpr(4)


@triton.jit
def _piece_kernel(
    logits_ptr, source_ptr, temperature_ptr, stats_ptr, vocabulary, pieces, PIECE: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0), tl.program_id(1)
    source = tl.load(source_ptr + row).to(tl.int64)
    if source >= 0:
        i = piece * PIECE + tl.arange(0, PIECE)
        logit = tl.load(logits_ptr + source * vocabulary + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)
        peak = tl.max(logit, axis=0)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        temperature = tl.maximum(tl.load(temperature_ptr + row), 1.1754944e-38)
        place = tl.min(tl.where(logit == peak, i, vocabulary), axis=0)
        out = stats_ptr + (row.to(tl.int64) * pieces + piece) * _STATS
        tl.store(out, peak)
        tl.store(out + 1, tl.sum(tl.exp(logit - safe), axis=0))
        tl.store(out + 2, tl.sum(tl.exp((logit - safe) / temperature), axis=0))
        tl.store(out + 3, place.to(tl.float32))


@triton.jit
def _token_kernel(
    logits_ptr, source_ptr, temperature_ptr, uniform_ptr, stats_ptr, id_ptr, logprob_ptr, vocabulary, pieces,
    PIECES_UP: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    source = tl.load(source_ptr + row).to(tl.int64)
    if source >= 0:
        p = tl.arange(0, PIECES_UP)
        here = p < pieces
        stats = stats_ptr + (row.to(tl.int64) * pieces + p) * _STATS
        peaks = tl.load(stats, mask=here, other=float("-inf"))
        peak = tl.max(peaks, axis=0)
        given = tl.load(temperature_ptr + row)
        temperature = tl.maximum(given, 1.1754944e-38)
        sums = tl.load(stats + 1, mask=here, other=0.0) * tl.exp(peaks - peak)
        normalizer = peak + tl.log(tl.sum(sums, axis=0))
        tempered = tl.load(stats + 2, mask=here, other=0.0) * tl.exp((peaks - peak) / temperature)
        tempered = tl.where(here & (peaks > float("-inf")), tempered, 0.0)
        cumulative = tl.cumsum(tempered, axis=0)
        target = tl.load(uniform_ptr + row) * tl.sum(tempered, axis=0)
        # The first piece whose end lies beyond the target; by rounding there may be none, then the last with any mass.
        beyond = tl.min(tl.where((cumulative > target) & (tempered > 0), p, PIECES_UP), axis=0)
        last = tl.max(tl.where(tempered > 0, p, 0), axis=0)
        piece = tl.where(beyond < PIECES_UP, beyond, last)
        before = tl.sum(tl.where(p < piece, tempered, 0.0), axis=0)
        i = piece * PIECE + tl.arange(0, PIECE)
        logit = tl.load(logits_ptr + source * vocabulary + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)
        mass = tl.exp((logit - peak) / temperature)
        inside = tl.cumsum(mass, axis=0)
        found = tl.min(tl.where((inside > target - before) & (mass > 0), i, vocabulary), axis=0)
        end = tl.max(tl.where(mass > 0, i, 0), axis=0)
        token = tl.where(found < vocabulary, found, end)
        best = tl.min(tl.where(peaks == peak, tl.load(stats + 3, mask=here, other=0.0), vocabulary), axis=0)
        token = tl.where(given == 0, best.to(tl.int32), token)
        token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
        tl.store(id_ptr + row, token.to(tl.int64))
        chosen = tl.load(logits_ptr + source * vocabulary + token).to(tl.float32)
        tl.store(logprob_ptr + row, chosen - normalizer)


def draw(
    logits_NV: Tensor, source_M: Tensor, temperature_M: Tensor, uniform_M: Tensor, ids_M: Tensor, logprobs_M: Tensor
) -> None:
    """Token ids and log-probs of M draws from the rows `source_M` of the logits (-1: none) into the last two."""
    vocabulary = logits_NV.shape[1]
    pieces = triton.cdiv(vocabulary, _PIECE)
    stats = torch.empty(len(source_M), pieces, 4, dtype=torch.float32, device=logits_NV.device)
    _piece_kernel[(len(source_M), pieces)](
        logits_NV, source_M, temperature_M, stats, vocabulary, pieces, PIECE=_PIECE, num_warps=8
    )
    _token_kernel[(len(source_M),)](
        logits_NV, source_M, temperature_M, uniform_M, stats, ids_M, logprobs_M, vocabulary, pieces,
        PIECES_UP=triton.next_power_of_2(pieces), PIECE=_PIECE, num_warps=8,
    )  # fmt: skip
