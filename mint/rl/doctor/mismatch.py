"""Sampler against trainer: the same tokens under the same weights must have the same log-probs.

At equal versions the gap is rounding: 1e-6 nats in float32, about 0.01 in bf16. Where it is larger the pattern over
time tells the cause: from the first step on (other numerics, a hidden temperature, lists shifted by one), growing with
every update (the sampler holds old weights), or from one step on.
"""

from __future__ import annotations

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


def check(run: Evidence) -> list[Finding]:
    current = [(step, gap) for step in run.steps if (gap := _gap(run, step)) is not None]
    if len(current) < 3:
        return []
    gaps = np.array([gap for _, gap in current])
    span = current[0][0].number, current[-1][0].number
    first, last = float(gaps[0]), float(np.quantile(gaps, USUAL_WORST))
    samples = shown(sorted((s for s in current[-1][0].samples if s.gap is not None), key=lambda s: -(s.gap or 0)))
    figures: dict[str, float | str] = {"gap at first, in nats a token": first, "gap in the worst steps": last}
    shift = _shift(current[0][0])
    if first > NOTICEABLE and shift is not None and shift < first / 5:
        return [
            Finding(
                "shifted_logprobs",
                "alarm",
                span,
                "The sampler's log-probs stand one token away from the trainer's: moved by one place they agree.",
                "Log-probs belong to targets: cut them as the targets are cut (logprobs[1:] with tokens[1:]).",
                0.98,
                figures | {"gap when moved by one": shift},
                samples,
            )
        ]
    if (last > NOTICEABLE and last > GROWTH * first) or (last > EXACTLY_GROWN and last > EXACT_GROWTH * first):
        start = next(step.number for step, gap in current if gap > max(last / 4, GROWTH * first))
        again = [step.number for step, gap in current if gap <= max(last / 100, GROWTH * first)]
        sometimes = len(again) > 1 and again[-1] > start
        return [
            Finding(
                "stale_sampler",
                "alarm",
                (start, span[1]),
                f"Sampler and trainer agree at step {span[0]} ({first:.2g} nats a token) and then drift apart, by "
                f"{last:.2g}, although the rollouts claim the newest policy: sampling goes on with old weights"
                + (
                    f", and is refreshed only now and then (they agree again at step {again[-1]})."
                    if sometimes
                    else ", or with those of another run."
                ),
                "Make a new sampling client after every optimizer step (save_weights_and_get_sampling_client) and use "
                "that one; check that no cached client, adapter or server is kept, and that it is made from the "
                "client that is trained.",
                0.97,
                figures | {"steps in agreement": len(again), "of steps": len(current)},
                samples,
            )
        ]
    if last <= NOTICEABLE:
        return []
    return [
        Finding(
            "mismatch",
            "alarm" if last > TOO_MUCH else "warning",
            span,
            f"For the same tokens and the same version sampler and trainer differ by {last:.2g} nats a token, from "
            "the first step on: every importance ratio is wrong.",
            "Compare compute_logprobs with forward on one sequence. Usual causes: log-probs recorded after temperature "
            "or top-p, another tokenizer or chat template on one side, different precision, different base weights.",
            0.9,
            figures,
            samples,
        )
    ]


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
