"""From logits to tokens: temperature, then top-k, top-p and min-p, then the draw; and the log-prob of what was drawn.

The log-prob is that of the policy itself, untempered and untruncated (docs/sampling.md). A draw inverts the cumulative
distribution in the order of token ids, so it is a function of the logits and one uniform number.

Shapes: N rows, V vocabulary, K draws a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.types import TopkRow


@dataclass(frozen=True)
class DrawParams:
    """One entry a row."""

    temperature_N: np.ndarray
    """0 is greedy."""
    top_k_N: np.ndarray
    """-1: no limit."""
    top_p_N: np.ndarray
    min_p_N: np.ndarray
    uniform_N: np.ndarray
    """In [0, 1)."""


def draw(logits_NV: Tensor, params: DrawParams) -> Tensor:
    """One token id for each row."""
    greedy_N = params.temperature_N == 0
    if greedy_N.all():
        return logits_NV.argmax(-1)
    scaled_NV = temper(logits_NV, np.where(greedy_N, 1.0, params.temperature_N))
    filters = (params.top_k_N != -1) | (params.top_p_N < 1) | (params.min_p_N > 0)
    if (filtered := np.flatnonzero(filters & ~greedy_N)).size:
        rows = torch.from_numpy(filtered).to(logits_NV.device)
        scaled_NV[rows] = _truncate(
            scaled_NV[rows], params.top_k_N[filtered], params.top_p_N[filtered], params.min_p_N[filtered]
        )
    ids_N = invert(scaled_NV.softmax(-1), params.uniform_N[:, None])[:, 0]
    if greedy_N.any():
        ids_N = torch.where(torch.from_numpy(greedy_N).to(ids_N.device), logits_NV.argmax(-1), ids_N)
    return ids_N


def logprobs_of(logits_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """log_softmax of the logits at the given ids, without the [N, V] result."""
    return logits_NV.gather(-1, ids_NK) - logits_NV.logsumexp(-1, keepdim=True)


def topk_rows(logits_NV: Tensor, k: int) -> list[TopkRow]:
    """The k likeliest tokens of each row with their log-probs, best first; fewer if the vocabulary is smaller."""
    ids_NK = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1).indices
    logprobs_NK = logprobs_of(logits_NV, ids_NK)
    return [list(zip(ids, lps, strict=True)) for ids, lps in zip(ids_NK.tolist(), logprobs_NK.tolist(), strict=True)]


def temper(logits_NV: Tensor, temperature_N: np.ndarray) -> Tensor:
    """Logits over temperature, shifted to a maximum of 0 first: no temperature is small enough to overflow."""
    divisor_N = torch.from_numpy(temperature_N.astype(np.float32)).to(logits_NV.device)
    tiny = torch.finfo(torch.float32).tiny
    return (logits_NV - logits_NV.amax(-1, keepdim=True)) / divisor_N.clamp(min=tiny)[:, None]


def invert(probs_NV: Tensor, uniform_NK: np.ndarray) -> Tensor:
    """The ids at which the cumulative distribution first exceeds each uniform number; never an id of probability 0."""
    cumulative_NV = probs_NV.cumsum(-1)
    total_N1 = cumulative_NV[:, -1:].contiguous()
    target_NK = torch.from_numpy(uniform_NK.astype(np.float32)).to(probs_NV.device) * total_N1
    # Rounding may lift the target to the total, which nothing exceeds.
    target_NK = torch.minimum(target_NK, total_N1.nextafter(torch.zeros_like(total_N1)))
    ids_NK = torch.searchsorted(cumulative_NV, target_NK, right=True)
    return ids_NK.clamp(max=probs_NV.shape[-1] - 1)  # only logits that are not numbers get this far


def _truncate(scaled_NV: Tensor, top_k_N: np.ndarray, top_p_N: np.ndarray, min_p_N: np.ndarray) -> Tensor:
    """-inf for the tokens the filters drop. Each filter sees what the one before it left; the likeliest token always
    stays, and of equally likely ones the lower id goes first."""
    vocabulary = scaled_NV.shape[-1]
    device = scaled_NV.device
    limit_N = torch.from_numpy(np.where(top_k_N == -1, vocabulary, top_k_N)).to(device)
    top_p_N1 = torch.from_numpy(top_p_N.astype(np.float32)).to(device)[:, None]
    min_p_N1 = torch.from_numpy(min_p_N.astype(np.float32)).to(device)[:, None]

    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    keep_NV = torch.arange(vocabulary, device=device) < limit_N[:, None]
    probs_NV = sorted_NV.masked_fill(~keep_NV, -torch.inf).softmax(-1)
    mass_before_NV = probs_NV.cumsum(-1) - probs_NV
    keep_NV &= (mass_before_NV < top_p_N1) | (top_p_N1 >= 1)
    keep_NV &= probs_NV >= min_p_N1 * probs_NV[:, :1]
    keep_NV[:, 0] = True
    dropped_NV = torch.empty_like(keep_NV).scatter_(-1, order_NV, ~keep_NV)
    return scaled_NV.masked_fill(dropped_NV, -torch.inf)
