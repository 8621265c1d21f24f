"""The losses: pure functions of packed tokens, chosen by name from one table.

Notation: p the learner's log-prob of the target token (carries the gradient), q the recorded `logprobs`, A the
`advantages`, r = exp(p - q). A loss gives a value for each token; the trainer multiplies it by `weights` and sums over
tokens and datums, with no averaging and no clamping of weights.

Which inputs a datum must hold is checked in `mint.engine.batch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mint.errors import BadRequest


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


@dataclass(frozen=True)
class LossFn:
    fn: Callable[[LossTokens, LossOptions], Terms]
    required: tuple[str, ...]
    """Inputs every datum must hold; `weights` is read by every loss, and is 1 where not given."""
    optional: tuple[str, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict)


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
    drift = (tokens.p - tokens.q).detach() * tokens.in_ratio
    zeros = torch.zeros(tokens.sequences, dtype=drift.dtype, device=drift.device)
    sums = zeros.index_add(0, tokens.sequence, drift)
    counts = zeros.index_add(0, tokens.sequence, tokens.in_ratio)
    sequence_ratio = torch.exp(sums / counts.clamp(min=1))
    return _clipped_objective(sequence_ratio[tokens.sequence] * torch.exp(tokens.p - tokens.p.detach()), tokens)


def _clipped_objective(ratio: Tensor, tokens: LossTokens) -> Terms:
    free = ratio * tokens.advantages
    bounded = torch.clamp(ratio, tokens.clip_low, tokens.clip_high) * tokens.advantages
    return Terms(-torch.minimum(free, bounded), ratio.detach(), bounded < free)


_POLICY = ("target_tokens", "logprobs", "advantages")
_CLIPS = ("clip_low_threshold", "clip_high_threshold")
# Divides the trainer's logits before the log-softmax, for log-probs that were recorded after tempering.
_TEMPERATURE = {"temperature": 1.0}


def _clip_options(low: float, high: float) -> dict[str, float]:
    """Bounds on the ratio itself, not distances from 1; inputs of the same names override them token by token."""
    return {"clip_low_threshold": low, "clip_high_threshold": high, **_TEMPERATURE}


LOSSES: dict[str, LossFn] = {
    "cross_entropy": LossFn(cross_entropy, ("target_tokens",)),
    "importance_sampling": LossFn(importance_sampling, _POLICY, options=_TEMPERATURE),
    "ppo": LossFn(ppo, _POLICY, _CLIPS, _clip_options(0.8, 1.2)),
    "cispo": LossFn(cispo, _POLICY, _CLIPS, _clip_options(0.0, 4.0)),
    # Vendors differ on beta (0.01 to 0.05); 0.05 is the value of the only public example of the upstream API.
    "dro": LossFn(dro, _POLICY, options={"beta": 0.05, **_TEMPERATURE}),
    # The range of the GSPO paper, 3e-4 below and 4e-4 above 1; far narrower than ppo's because s is a mean.
    "gspo": LossFn(gspo, _POLICY, (*_CLIPS, "sequence_ratio_mask"), _clip_options(0.9997, 1.0004)),
}


def choose_loss(name: str, config: Mapping[str, float | str] | None) -> tuple[LossFn, dict[str, float]]:
    """The loss of that name with its options: those given, checked, over the defaults."""
    if name not in LOSSES:
        raise BadRequest(f"unknown loss_fn {name!r}; known: {', '.join(LOSSES)}.")
    loss = LOSSES[name]
    options = dict(loss.options)
    for key, value in (config or {}).items():
        if key not in options:
            known = ", ".join(f"{k}={v}" for k, v in options.items()) or "none"
            raise BadRequest(f"loss_fn_config of {name} has unknown key {key!r}; its options and defaults: {known}.")
        if isinstance(value, str) or not math.isfinite(value) or value < 0 or (key == "temperature" and value == 0):
            least = "> 0" if key == "temperature" else ">= 0"
            raise BadRequest(f"loss_fn_config[{key!r}] is {value!r}; it must be a number {least}.")
        options[key] = float(value)
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", math.inf)
    if low > high:
        raise BadRequest(f"clip_low_threshold {low} is above clip_high_threshold {high}; both bound the ratio itself.")
    return loss, options
