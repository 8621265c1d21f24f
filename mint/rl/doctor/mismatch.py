"""Sampler against trainer: the same tokens under the same weights must have the same log-probs.

At equal versions the gap is rounding: 1e-6 nats in float32, about 0.01 in bf16. Where it is larger the pattern over
time tells the cause: from the first step on (other numerics, a hidden temperature, lists shifted by one), growing with
every update (the sampler holds old weights), or from one step on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mint.rl.doctor.evidence import Evidence, Step
from mint.rl.doctor.finding import Finding, shown

NOTICEABLE, TOO_MUCH = 0.05, 0.15
"""Nats a token. At 0.15 a ratio is typically off by 16 %, about as far as a clip range allows a whole update to go."""
GROWTH = 10.0
USUAL_WORST = 0.8
"""Quantile of the steps' gaps: a sampler refreshed every few steps agrees again at some of them."""
EXACTLY_GROWN, EXACT_GROWTH = 0.003, 1000.0
"""Where both compute in float32 and agreed to 1e-6 at first, a sampler one version behind shows: it is off by what one
update does."""


@dataclass(frozen=True)
class _Gaps:
    """Sampler against trainer, step by step."""

    by_step: list[tuple[Step, float]]
    """In nats a token."""

    @cached_property
    def first(self) -> float:
        return self.by_step[0][1]

    @cached_property
    def worst(self) -> float:
        return float(np.quantile([gap for _, gap in self.by_step], USUAL_WORST))

    @property
    def span(self) -> tuple[int, int]:
        return self.by_step[0][0].number, self.by_step[-1][0].number

    @property
    def figures(self) -> dict[str, float | str]:
        return {"gap at first, in nats a token": self.first, "gap in the worst steps": self.worst}

    @property
    def samples(self) -> tuple[dict[str, Any], ...]:
        known = [s for s in self.by_step[-1][0].samples if s.gap is not None]
        return shown(sorted(known, key=lambda s: -(s.gap or 0)))


def check(run: Evidence) -> list[Finding]:
    gaps = _Gaps([(step, gap) for step in run.steps if (gap := _gap(run, step)) is not None])
    if len(gaps.by_step) < 3:
        return []
    found = _shifted(gaps) or _drifted(gaps) or _apart(gaps)
    return [found] if found else []


def _shifted(gaps: _Gaps) -> Finding | None:
    shift = _shift(gaps.by_step[0][0])
    if gaps.first <= NOTICEABLE or shift is None or shift >= gaps.first / 5:
        return None
    return Finding(
        "shifted_logprobs",
        "alarm",
        gaps.span,
        "The sampler's log-probs stand one token away from the trainer's: moved by one place they agree.",
        "Log-probs belong to targets: cut them as the targets are cut (logprobs[1:] with tokens[1:]).",
        0.98,
        gaps.figures | {"gap when moved by one": shift},
        gaps.samples,
    )


def _drifted(gaps: _Gaps) -> Finding | None:
    first, worst = gaps.first, gaps.worst
    grown = worst > NOTICEABLE and worst > GROWTH * first
    if not grown and not (worst > EXACTLY_GROWN and worst > EXACT_GROWTH * first):
        return None
    start = next(step.number for step, gap in gaps.by_step if gap > max(worst / 4, GROWTH * first))
    again = [step.number for step, gap in gaps.by_step if gap <= max(worst / 100, GROWTH * first)]
    sometimes = len(again) > 1 and again[-1] > start
    return Finding(
        "stale_sampler",
        "alarm",
        (start, gaps.span[1]),
        f"Sampler and trainer agree at step {gaps.span[0]} ({first:.2g} nats a token) and then drift apart, by "
        f"{worst:.2g}, although the rollouts claim the newest policy: sampling goes on with old weights"
        + (
            f", and is refreshed only now and then (they agree again at step {again[-1]})."
            if sometimes
            else ", or with those of another run."
        ),
        "Make a new sampling client after every optimizer step (save_weights_and_get_sampling_client) and use that "
        "one; check that no cached client, adapter or server is kept, and that it is made from the client that is "
        "trained.",
        0.97,
        gaps.figures | {"steps in agreement": len(again), "of steps": len(gaps.by_step)},
        gaps.samples,
    )


def _apart(gaps: _Gaps) -> Finding | None:
    if gaps.worst <= NOTICEABLE:
        return None
    return Finding(
        "mismatch",
        "alarm" if gaps.worst > TOO_MUCH else "warning",
        gaps.span,
        f"For the same tokens and the same version sampler and trainer differ by {gaps.worst:.2g} nats a token, from "
        "the first step on: every importance ratio is wrong.",
        "Compare compute_logprobs with forward on one sequence. Usual causes: log-probs recorded after temperature "
        "or top-p, another tokenizer or chat template on one side, different precision, different base weights.",
        0.9,
        gaps.figures,
        gaps.samples,
    )


def _gap(run: Evidence, step: Step) -> float | None:
    """Of the rollouts sampled by the very policy they are trained from. Optimizer steps within a step move the trainer,
    so with several of them only the rollouts with the smallest gaps, those of the first, are looked at."""
    gaps = [s.gap for s in step.samples if s.gap is not None and s.version == step.number]
    if len(gaps) < 4:
        return None
    return float(np.quantile(gaps, 0.5 / max(int(run.config.get("num_substeps", 1)), 1)))


def _shift(step: Step) -> float | None:
    shifted = [s.shifted_gap for s in step.samples if s.shifted_gap is not None]
    return float(np.median(shifted)) if shifted else None
