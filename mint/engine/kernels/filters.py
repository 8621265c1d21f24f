"""What top-k, top-p and min-p leave of a distribution, without sorting the vocabulary.

A filter keeps the likeliest tokens, and of equally likely ones those of the lowest ids. So what it keeps is told by a
logit, the cut, and how many of the tokens exactly there are kept. One program a draw finds them bit by bit, counting or
summing over the vocabulary what lies at or above a guess: 16 passes a filter in bfloat16, 32 in float32. The rules are
those of `mint.engine.sampler.logits`: top-k first, top-p of what it leaves, min-p of the likeliest; one token stays.

Shapes: M draws, V vocabulary, P pieces of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.kernels.overlap import follow, overlapping

_STEP = 8192


@dataclass(frozen=True)
class Filters:
    """One entry a draw."""

    top_k_M: Tensor
    """Not above 0: no limit."""
    top_p_M: Tensor
    min_p_M: Tensor


@triton.jit
def ordered(logit, like_ptr):
    """Unsigned numbers in the order of the logits, in as many bits as these have."""
    bits = logit.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    if like_ptr.dtype.element_ty == tl.bfloat16:
        key = key >> 16
    return key


@triton.jit
def _measured(
    row_ptr, like_ptr, peak, temperature, cut, vocabulary, ABOVE: tl.constexpr, COUNTS: tl.constexpr, STEP: tl.constexpr
):
    """How many logits, or how much mass, at the cut and above it, or only above; and the mass of one at the cut."""
    total = tl.zeros([STEP], dtype=tl.float32)
    tie = tl.zeros([STEP], dtype=tl.float32)
    for start in range(0, vocabulary, STEP):
        i = start + tl.arange(0, STEP)
        logit = tl.load(row_ptr + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)
        key = ordered(logit, like_ptr)
        taken = ((key > cut) if ABOVE else (key >= cut)) & (i < vocabulary)
        if COUNTS:
            total += taken.to(tl.float32)
        else:
            mass = tl.exp((logit - peak) / temperature)
            total += tl.where(taken, mass, 0.0)
            tie = tl.maximum(tie, tl.where(key == cut, mass, 0.0))
    return tl.sum(total, axis=0), tl.max(tie, axis=0)


@triton.jit
def _filter_kernel(
    logits_ptr, logits_row, source_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, stats_ptr, cut_ptr, tie_ptr,
    kept_ptr, vocabulary, pieces,
    BITS: tl.constexpr, PIECES_UP: tl.constexpr, PIECE: tl.constexpr, STEP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    source = tl.load(source_ptr + m).to(tl.int64)
    given, top_k = tl.load(temperature_ptr + m), tl.load(top_k_ptr + m)
    top_p, min_p = tl.load(top_p_ptr + m), tl.load(min_p_ptr + m)
    follow(OVERLAPS)
    if source >= 0:
        row_ptr = logits_ptr + source * logits_row
        temperature = tl.maximum(given, 1.1754944e-38)
        p = tl.arange(0, PIECES_UP)
        peaks = tl.load(stats_ptr + (m.to(tl.int64) * pieces + p) * 4, mask=p < pieces, other=float("-inf"))
        peak = tl.max(peaks, axis=0)
        everything = tl.full([], 0, dtype=tl.uint32)
        highest = tl.full([], 1, dtype=tl.uint32) << (BITS - 1)
        cut, quota = everything, vocabulary
        if (top_k > 0) & (top_k < vocabulary) & (given > 0):
            bit = highest
            for _pass in range(0, BITS):
                guess = cut | bit
                count, _ = _measured(row_ptr, logits_ptr, peak, temperature, guess, vocabulary, False, True, STEP)
                cut = tl.where(count >= top_k, guess, cut)
                bit = bit >> 1
            count, _ = _measured(row_ptr, logits_ptr, peak, temperature, cut, vocabulary, True, True, STEP)
            quota = top_k - count.to(tl.int32)
        above, tie = _measured(row_ptr, logits_ptr, peak, temperature, cut, vocabulary, True, False, STEP)
        if (top_p < 1.0) & (given > 0):
            # At least a trace of mass, so that the likeliest token is never below the cut.
            goal = tl.maximum(top_p * (above + tie * quota), 1e-30)
            if above >= goal:
                cut, bit = everything, highest
                for _pass in range(0, BITS):
                    guess = cut | bit
                    mass, _ = _measured(row_ptr, logits_ptr, peak, temperature, guess, vocabulary, False, False, STEP)
                    cut = tl.where(mass >= goal, guess, cut)
                    bit = bit >> 1
                above, tie = _measured(row_ptr, logits_ptr, peak, temperature, cut, vocabulary, True, False, STEP)
                quota = vocabulary
            if tie > 0.0:
                quota = tl.minimum(quota, tl.maximum(tl.ceil((goal - above) / tie), 1.0).to(tl.int32))
        tl.store(cut_ptr + m * 2, cut.to(tl.int32, bitcast=True))
        tl.store(cut_ptr + m * 2 + 1, quota)
        tl.store(tie_ptr + m, tie)
        for start in range(0, vocabulary, STEP):
            i = start + tl.arange(0, STEP)
            logit = tl.load(row_ptr + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)
            key = ordered(logit, logits_ptr)
            mass = tl.exp((logit - peak) / temperature)
            stays = (mass >= min_p) & (i < vocabulary)
            masses = tl.reshape(tl.where(stays & (key > cut), mass, 0.0), [STEP // PIECE, PIECE])
            ties = tl.reshape((stays & (key == cut)).to(tl.float32), [STEP // PIECE, PIECE])
            piece = start // PIECE + tl.arange(0, STEP // PIECE)
            kept = kept_ptr + (m.to(tl.int64) * pieces + piece) * 2
            tl.store(kept, tl.sum(masses, axis=1), mask=piece < pieces)
            tl.store(kept + 1, tl.sum(ties, axis=1), mask=piece < pieces)


def filtered(
    logits_NV: Tensor, source_M: Tensor, temperature_M: Tensor, filters: Filters, stats_MP4: Tensor, piece: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each draw: the cut and how many of those at it are kept [M, 2], the mass of one of these [M], the mass above
    the cut and the number of those at it in each piece of the vocabulary [M, P, 2]; and min-p [M] as it was given."""
    count, pieces = stats_MP4.shape[:2]
    cut = torch.empty(count, 2, dtype=torch.int32, device=logits_NV.device)
    tie = torch.empty(count, dtype=torch.float32, device=logits_NV.device)
    kept = torch.empty(count, pieces, 2, dtype=torch.float32, device=logits_NV.device)
    _filter_kernel[(count,)](
        logits_NV, logits_NV.stride(0), source_M, temperature_M, filters.top_k_M, filters.top_p_M, filters.min_p_M,
        stats_MP4, cut, tie, kept, logits_NV.shape[1], pieces, BITS=16 if logits_NV.dtype == torch.bfloat16 else 32,
        PIECES_UP=triton.next_power_of_2(pieces), PIECE=piece, STEP=_STEP, num_warps=16,
        **overlapping(logits_NV.device),
    )  # fmt: skip
    return cut, tie, kept, filters.min_p_M
