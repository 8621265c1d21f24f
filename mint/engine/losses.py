"""The losses: pure functions of packed tokens, chosen by name from one table.

Notation: p the learner's log-prob of the target token (carries the gradient), q the recorded `logprobs`, A the
`advantages`, r = exp(p - q). A loss gives a value for each token; the trainer multiplies it by `weights` and sums over
tokens and datums, with no averaging and no clamping of weights.

Which inputs and options each loss has is said once, in `mint.checks.LOSS_FNS`, which the server advertises and the
client checks against too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTokens:
    """What a loss sees, all of shape [C]: the packed tokens that can matter, without those of weight 0."""

    p: Tensor
    q: Tensor
    advantages: Tensor
    clip_low: Tensor
    clip_high: Tensor
    in_ratio: Tensor
    """1 where a token enters its sequence's ratio, else 0."""
    sequence: Tensor
    """Index of the sequence each token belongs to."""
    sequences: int


@dataclass(frozen=True)
class Terms:
    """One value a token, all of shape [C]."""

    loss: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None
    """True where the clip changed the term."""


LossOptions = Mapping[str, float]


LossFn = Callable[[LossTokens, LossOptions], Terms]


def cross_entropy(tokens: LossTokens, options: LossOptions) -> Terms:
    """-p"""
    return Terms(-tokens.p)


def importance_sampling(tokens: LossTokens, options: LossOptions) -> Terms:
    """-r A"""
    ratio = torch.exp(tokens.p - tokens.q)
    return Terms(-ratio * tokens.advantages, ratio)


def ppo(tokens: LossTokens, options: LossOptions) -> Terms:
    """-min(r A, clip(r, low, high) A)"""
    return _clipped_objective(torch.exp(tokens.p - tokens.q), tokens)


def cispo(tokens: LossTokens, options: LossOptions) -> Terms:
    """-stopgrad(clip(r, low, high)) p A: the clip bounds a token's weight, and no token loses its gradient"""
    ratio = torch.exp(tokens.p - tokens.q).detach()
    bounded = torch.clamp(ratio, tokens.clip_low, tokens.clip_high)
    return Terms(-bounded * tokens.p * tokens.advantages, ratio, bounded != ratio)


def dro(tokens: LossTokens, options: LossOptions) -> Terms:
    """-(p A - beta/2 (p - q)^2)"""
    drift = tokens.p - tokens.q
    loss = -(tokens.p * tokens.advantages - 0.5 * options["beta"] * drift.square())
    return Terms(loss, torch.exp(drift.detach()))


def gspo(tokens: LossTokens, options: LossOptions) -> Terms:
    """-min(s A, clip(s, low, high) A) with s the ratio of the whole sequence, length-normalised:
    s = exp(mean of p - q over the tokens that enter the ratio), the same for all its tokens.

    As in the paper's per-token form s is stopgrad(s) exp(p - stopgrad(p)): its gradient goes through each token's own
    p, which for equal advantages is that of the sequence objective times the sequence's length, and lets advantages
    differ within a sequence. Which tokens enter the ratio: `sequence_ratio_mask`, else those of non-zero weight.
    """
    # Not by a factor of 0: what does not enter the ratio may not be finite.
    drift = torch.where(tokens.in_ratio != 0, (tokens.p - tokens.q).detach() * tokens.in_ratio, 0.0)
    zeros = torch.zeros(tokens.sequences, dtype=drift.dtype, device=drift.device)
    sums = zeros.index_add(0, tokens.sequence, drift)
    counts = zeros.index_add(0, tokens.sequence, tokens.in_ratio)
    sequence_ratio = torch.exp(sums / counts.clamp(min=1))
    return _clipped_objective(sequence_ratio[tokens.sequence] * torch.exp(tokens.p - tokens.p.detach()), tokens)


def _clipped_objective(ratio: Tensor, tokens: LossTokens) -> Terms:
    free = ratio * tokens.advantages
    bounded = torch.clamp(ratio, tokens.clip_low, tokens.clip_high) * tokens.advantages
    return Terms(-torch.minimum(free, bounded), ratio.detach(), bounded < free)


LOSSES: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
