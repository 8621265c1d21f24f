"""Whether the policy moves: compared on the tokens two evaluations share, and by the size of its updates."""

from __future__ import annotations

import numpy as np

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown
from mint.rl.doctor.statistics import SURE, change_of, moved

FEWEST_STEPS = 5
FEWEST_TOKENS = 50
STILL = 1e-5
"""Nats a token; float32 rounding is 1e-6."""
SLOW = 2e-4
"""Nats a token and optimizer step. Runs that learn move by 1e-3 to 1e-1; at this pace a factor of 2 in the odds of a
token takes 3,500 steps."""
SMALL_UPDATE = 1e-5
"""Of the weights' norm, in one step: one per cent in a thousand steps."""


def check(run: Evidence) -> list[Finding]:
    updates = [s for s in run.steps if s.metrics.get("train/optim_steps", 1) > 0 and not s.metrics.get("train/skipped")]
    wasted = [s for s in run.steps if s.metrics.get("train/datums") and not s.metrics.get("train/optim_steps", 1)]
    if len(wasted) >= FEWEST_STEPS:
        found: Finding | None = _not_stepped(run, len(wasted), len(updates))
    else:
        found = (_by_evaluation(run) or _by_updates(run)) if len(updates) >= FEWEST_STEPS else None
    return [finding for finding in (found, _replaced(run), _repeated(run)) if finding]


def _not_stepped(run: Evidence, steps: int, updates: int) -> Finding:
    never = not updates
    return Finding(
        "frozen" if never else "missing_updates",
        "alarm" if never else "warning",
        run.span,
        f"In {steps} of {steps + updates} steps gradients were computed and the optimizer took no step: "
        + (
            "the weights never change."
            if never
            else "they pile up until the next one, which then also learns from rollouts of older weights."
        ),
        "Call optim_step after forward_backward, once a step.",
        0.98 if never else 0.9,
        {"steps with gradients and no update": steps, "steps with an update": updates},
        shown(run.steps[-1].samples),
    )


def _replaced(run: Evidence) -> Finding | None:
    """The optimizer counts its steps; a count that falls belongs to other weights."""
    numbers, counts = run.series("optim/step")
    falls = [i for i in range(1, len(counts)) if counts[i] <= counts[i - 1]]
    if not falls:
        return None
    at = falls[0]
    step = next(s for s in run.steps if s.number == numbers[at])
    _, distance = run.series("policy/distance_from_base")
    figures: dict[str, float | str] = {"count before": float(counts[at - 1]), "count after": float(counts[at])}
    if len(distance) == len(counts):
        figures |= {"nats from the base model before": distance[at - 1], "after": distance[at]}
    return Finding(
        "weights_replaced",
        "alarm",
        (numbers[at], numbers[at]),
        f"At step {numbers[at]} the optimizer's own count goes from {counts[at - 1]:.0f} back to {counts[at]:.0f}: "
        "other weights, or a fresh optimizer, were put in place of those being trained.",
        "Look for a load_state, a resume or a new training client before this step; going on means loading the newest "
        "checkpoint with its optimizer (load_state_with_optimizer).",
        0.97,
        figures,
        shown(step.samples),
    )


def _repeated(run: Evidence) -> Finding | None:
    """Own loops only: `mint.rl.recorder` counts datums sent again before an optimizer step."""
    numbers, repeated = run.series("train/datums_repeated")
    often = [number for number, count in zip(numbers, repeated, strict=True) if count]
    if len(often) < max(FEWEST_STEPS, 0.5 * len(numbers)):
        return None
    return Finding(
        "repeated_datums",
        "warning",
        (often[0], often[-1]),
        f"In {len(often)} of {len(numbers)} steps the same datums were sent to forward_backward again before the "
        "optimizer step: their gradient counts twice.",
        "Send each datum once an optimizer step; a retry after an error must not send again what went through, and "
        "several passes over a batch need an optimizer step between them.",
        0.9,
        {"datums sent again": float(repeated.sum()), "steps": len(often)},
        shown(run.steps[-1].samples),
    )


def _by_evaluation(run: Evidence) -> Finding | None:
    if len(run.evaluations) < 2:
        return None
    first, last = run.evaluations[0], run.evaluations[-1]
    distance = moved(first, last)
    steps = last.version - first.version
    if distance is None or distance[1] < FEWEST_TOKENS or steps < FEWEST_STEPS:
        return None
    nats, tokens = distance
    figures: dict[str, float | str] = {"moved, in nats a token": nats, "over steps": steps, "tokens compared": tokens}
    rate = _figures(run)
    relative = rate.get("update of the weights' norm", 0.0)
    if nats < STILL and not 0 < relative < SMALL_UPDATE:
        lr = rate.get("learning rate")
        cause = (
            "the learning rate is 0" if lr == 0 else "the optimizer changes nothing" if rate.get("update") == 0
            else "updates do not reach the policy that is sampled"
        )  # fmt: skip
        return Finding(
            "frozen",
            "alarm",
            (first.version, last.version),
            f"After {steps} steps the policy gives every token the probability it had at the start: {cause}.",
            "Check the learning rate and its schedule, that optim_step follows forward_backward, and that the sampling "
            "client is made after it.",
            0.97,
            {**figures, **rate},
            shown(last.samples),
        )
    rewarded = change_of(run, "reward")
    if nats < SLOW * steps and not (rewarded and rewarded.sure > SURE):
        return _slow({**figures, **rate}, (first.version, last.version), run, nats / steps)
    return None


def _by_updates(run: Evidence) -> Finding | None:
    """Where there are no two evaluations to compare."""
    rate = _figures(run)
    relative = rate.get("update of the weights' norm")
    rewarded = change_of(run, "reward")
    if len(run.evaluations) >= 2 or relative is None or relative > SMALL_UPDATE or (rewarded and rewarded.sure > SURE):
        return None
    if relative == 0:
        return Finding(
            "frozen",
            "alarm",
            run.span,
            "The optimizer takes steps and changes no weight.",
            "Check the learning rate and its schedule.",
            0.95,
            dict(rate),
            shown(run.steps[-1].samples),
        )
    return _slow(dict(rate), run.span, run, None)


def _slow(figures: dict[str, float | str], span: tuple[int, int], run: Evidence, pace: float | None) -> Finding:
    said = f" by {pace:.1g} nats a token and step" if pace is not None else ""
    return Finding(
        "learning_rate_small",
        "warning",
        span,
        f"The policy hardly moves{said}, and the reward does not rise: the learning rate is too small.",
        "Raise the learning rate tenfold until the reward or the KL moves; mint.rl.lr.get_lr suggests where to begin "
        "(LoRA wants about ten times what full fine-tuning does).",
        0.9,
        figures,
        shown(run.steps[-1].samples),
    )


def _figures(run: Evidence) -> dict[str, float]:
    figures: dict[str, float] = {}
    _, lr = run.series("optim/lr")
    _, update = run.series("optim/update_norm")
    _, weight = run.series("optim/weight_norm")
    if len(lr):
        figures["learning rate"] = float(np.max(lr))
    if len(update):
        figures["update"] = float(np.mean(update))
    if len(update) and len(update) == len(weight) and weight.min() > 0:
        figures["update of the weights' norm"] = float(np.mean(update / weight))
    return figures
