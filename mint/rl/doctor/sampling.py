"""Settings that change under a run: how answers are drawn, and the learning rate; logged or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mint.rl.doctor.evidence import Evidence, Sample, Step
from mint.rl.doctor.finding import Finding, shown

AROUND = 3
"""Steps on either side of a jump, at least."""
JUMP = 4.5
"""Standard errors: every step of a window is a place where one could be."""
FACTOR = 1.5
TINY = 1e-3
"""Nats a token below which an answer is certain, and no factor means anything."""
NOTICEABLE = 0.1
"""Nats a token; answers that are nearly certain stay so at any usual temperature."""
UNEXPLAINED = 2.0
"""A factor that learning does not make at one stroke, for where no evaluation says whether it was the policy."""
BETTER_FIT = 0.8
"""Two levels must leave at most this much of the scatter that a straight line leaves."""
LITTLE, MOSTLY = 0.4, 0.7
"""Share of the jump, in logarithms, that the evaluations show as well: little, and it is the sampling that changed;
most of it, and it is the policy."""
LARGE = 0.25
RATE_JUMP = 8.0
"""Adam's steps are of the learning rate's size; what the data does to them stays well below this factor."""


SETTINGS = (
    "top_p", "top_k", "min_p", "max_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def check(run: Evidence) -> list[Finding]:
    found = _logged(run) or _setting(run) or _jump(run)
    return [finding for finding in (found, _rate(run)) if finding]


def _logged(run: Evidence) -> Finding | None:
    """The records say so."""
    numbers, values = run.series("sampling/temperature")
    jumps = np.abs(np.diff(values))
    if not len(jumps) or jumps.max() < 1e-6:
        return None
    scheduled = not isinstance(run.config.get("temperature"), int | float)
    at = int(jumps.argmax()) + 1
    if scheduled and jumps.max() < LARGE:
        return None
    step = next(s for s in run.steps if s.number == numbers[at])
    return Finding(
        "temperature_changed",
        "notice" if scheduled else "warning",
        (numbers[at], numbers[at]),
        f"The sampling temperature goes from {values[at - 1]:g} to {values[at]:g} at step {numbers[at]}"
        + (", as scheduled." if scheduled else ", which the configuration does not say."),
        "Rewards before and after are not comparable; keep the temperature or change it slowly by a schedule "
        '("linear 1.0 -> 0.7").',
        0.5 if scheduled else 0.95,
        {"before": float(values[at - 1]), "after": float(values[at])},
        shown(step.samples),
    )


def _setting(run: Evidence) -> Finding | None:
    """Another sampling parameter, where the loop records them."""
    for name in SETTINGS:
        numbers, values = run.series(f"sampling/{name}")
        changed = np.flatnonzero(np.abs(np.diff(values)) > 1e-6)
        if not len(changed):
            continue
        at = int(changed[0]) + 1
        step = next(s for s in run.steps if s.number == numbers[at])
        return Finding(
            "sampling_changed",
            "warning",
            (numbers[at], numbers[at]),
            f"{name} goes from {values[at - 1]:g} to {values[at]:g} at step {numbers[at]}: answers are drawn "
            "differently from there on.",
            "Rewards, lengths and entropies before and after are not comparable; find what changes the sampling "
            "parameters and keep them for the whole run.",
            0.95,
            {"before": float(values[at - 1]), "after": float(values[at])},
            shown(step.samples),
        )
    return None


def _rate(run: Evidence) -> Finding | None:
    """The learning rate as logged, or the size of the updates where the log says nothing of it."""
    scheduled = not isinstance(run.config.get("learning_rate"), int | float)
    lr_numbers, lr = run.series("optim/lr")
    numbers, update = run.series("optim/update_norm")
    logged = dict(zip(lr_numbers, lr, strict=True))
    for at in range(AROUND, len(update)):
        before, after = float(np.median(update[at - AROUND : at])), float(np.median(update[at : at + AROUND]))
        told = logged.get(numbers[at], 1.0) / (logged.get(numbers[at - 1]) or 1.0)
        factor = after / before if before > 0 else 1.0
        sudden = update[at] / update[at - 1] if update[at - 1] > 0 else 1.0
        lasts = len(update) - at >= AROUND or numbers[-1] < run.span[1] - AROUND  # or ended what there was to learn
        if scheduled or not (_apart(factor) and _apart(sudden) and (lasts or _apart(told))):
            continue
        step = next(s for s in run.steps if s.number == numbers[at])
        said = (
            f"the learning rate goes from {logged[numbers[at - 1]]:g} to {logged[numbers[at]]:g}"
            if _apart(told)
            else f"updates become {max(factor, 1 / factor):.0f} times {'larger' if factor > 1 else 'smaller'}, "
            "although the logged learning rate stays"
        )
        return Finding(
            "learning_rate_changed",
            "alarm" if factor > 1 else "warning",
            (numbers[at], numbers[at]),
            f"At step {numbers[at]} {said}: from there on the run is another one.",
            "Find what sets the learning rate there (a schedule that ends, a resumed optimizer, a unit); a change on "
            'purpose belongs into the configuration ("linear 1e-3 -> 1e-4").',
            0.96,
            {"update before": before, "update after": after, "learning rate, after to before": told},
            shown(step.samples),
        )
    return None


def _apart(factor: float) -> bool:
    return not 1 / RATE_JUMP < factor < RATE_JUMP


def _surprise(groups: Sequence[Sequence[Sample]]) -> tuple[float, float]:
    """Mean and its standard error, groups being the independent draws."""
    means = [float(np.mean([s.surprise for s in group])) for group in groups]
    return float(np.mean(means)), float(np.std(means, ddof=1)) / math.sqrt(len(means))


def _first_seen(run: Evidence) -> list[tuple[Step, list[list[Sample]]]]:
    """The steps with their groups on new problems: answers to those trained on before are surer for that reason."""
    seen: set[int] = set()
    found = []
    for step in run.steps:
        new = [group for group in step.groups if group[0].prompt_key not in seen]
        seen |= {group[0].prompt_key for group in step.groups}
        if len(new) > 2:
            found.append((step, new))
    return found


def _jump(run: Evidence) -> Finding | None:
    """The answers become less or more likely from one step to the next, by more than one update explains."""
    fresh = _first_seen(run)
    steps = [step for step, _ in fresh]
    if len(steps) < 2 * AROUND or not run.complete:
        return None
    means, errors = np.array([_surprise(groups) for _, groups in fresh]).T
    sure, at = max((_jump_at(means, errors, at), at) for at in range(AROUND, len(steps) - AROUND + 1))
    if sure < JUMP:
        return None
    before, after = float(means[:at].mean()), float(means[at:].mean())
    number = steps[at].number
    held = _held_out(run, number)
    explained = math.log(held) / math.log(after / before) if held is not None else None
    if explained is not None and explained > MOSTLY:
        return None
    same_policy = explained is not None and explained < LITTLE
    if not same_policy and 1 / UNEXPLAINED < after / before < UNEXPLAINED:
        return None
    return Finding(
        "temperature_changed",
        "alarm" if same_policy else "warning",
        (number, number),
        f"From step {number} on sampled answers are {'less' if after > before else 'more'} likely under the policy "
        f"than before, at one stroke ({before:.2g} to {after:.2g} nats a token)"
        + (", while the evaluations, drawn at their own temperature, are not: " if same_policy else ": ")
        + "the sampling temperature (or top-p, or the prompt) changed in the middle of the run.",
        "Compare the sampling parameters before and after this step (a wrapper, a client default, an environment that "
        "sets its own). If nothing changed there, the update before this step did it: see the gradient norm.",
        0.93 if same_policy else 0.6,
        {"entropy before": before, "entropy after": after, "standard errors": sure}
        | ({} if held is None else {"same ratio in evaluations": held}),
        shown([*steps[at].samples[:1], *steps[at - 1].samples[:1]]),
    )


def _jump_at(means: np.ndarray, errors: np.ndarray, at: int) -> float:
    """By how many standard errors the levels before and after `at` differ; 0 where a slow drift fits as well, or where
    the steps next to it do not differ as the whole does."""
    before, after = means[:at], means[at:]
    error = math.hypot(*(np.sqrt((part**2).sum()) / len(part) for part in (errors[:at], errors[at:])))
    # In logarithms, where the entropy of a policy that learns falls along a line.
    logs = np.log(np.maximum(means, TINY))
    levels = sum(((part - part.mean()) ** 2).sum() for part in (logs[:at], logs[at:]))
    steps = np.arange(len(logs))
    drift = ((logs - np.polyval(np.polyfit(steps, logs, 1), steps)) ** 2).sum()
    whole = float(logs[at:].mean() - logs[:at].mean())
    near = float(np.median(logs[at : at + AROUND]) - np.median(logs[at - AROUND : at]))
    if abs(after.mean() - before.mean()) < NOTICEABLE:
        return 0.0
    if min(abs(whole), abs(near)) < math.log(FACTOR) or whole * near < 0 or levels > BETTER_FIT * drift:
        return 0.0
    return float(abs(after.mean() - before.mean()) / max(error, 1e-9))


def _held_out(run: Evidence, number: int) -> float | None:
    """By what factor the evaluations' surprise changed from before the step to after it, as the rollouts' is taken."""
    before = [e for e in run.evaluations if e.version < number]
    after = [e for e in run.evaluations if e.version >= number]
    if not before or not after:
        return None
    old, new = (float(np.mean([s.surprise for e in some for s in e.samples])) for some in (before, after))
    return new / old if old > 0 and new > 0 else None
