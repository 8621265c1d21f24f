"""A run that is healthy in every other respect and does not get better."""

from __future__ import annotations

import numpy as np

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown
from mint.rl.doctor.statistics import change_of

FEWEST_STEPS = 20
SMALL = 0.02
SIGNAL = 0.3


def check(run: Evidence) -> list[Finding]:
    change = change_of(run, "reward")
    _, mixed = run.series("env/all/by_group/frac_mixed")
    if len(run.steps) < FEWEST_STEPS or change is None or not len(mixed) or mixed.mean() < SIGNAL:
        return []
    # A gain of SMALL must be outside what the noise allows; else it is not known that there is none.
    if change.size + 2 * change.error > 2 * SMALL + change.error or abs(change.size) > SMALL:
        return []
    return [
        Finding(
            "no_progress",
            "notice",
            run.span,
            f"The reward is where it was ({change.before:.2f}, now {change.after:.2f}) after {len(run.steps)} "
            "steps, although groups have signal.",
            "Try a learning rate three times larger, larger batches, or more steps; read a few answers to see what "
            "distinguishes those that are paid.",
            0.4,
            {"reward before": change.before, "after": change.after, "groups with signal": float(np.mean(mixed))},
            shown(run.steps[-1].samples),
        )
    ]
