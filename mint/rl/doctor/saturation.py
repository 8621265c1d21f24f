"""Saturation: the problems are mostly solved, so most of the sampling teaches nothing any more."""

from __future__ import annotations

import numpy as np

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown

MOSTLY = 0.6
LATEST_STEPS = 5


def check(run: Evidence) -> list[Finding]:
    numbers, good = run.series("env/all/by_group/frac_all_good")
    if len(good) < LATEST_STEPS or good[-LATEST_STEPS:].mean() < MOSTLY:
        return []
    last = [step for step in run.steps if step.number in numbers[-LATEST_STEPS:]]
    _, reward = run.series("env/all/reward/total")
    return [
        Finding(
            "saturation",
            "notice",
            (last[0].number, last[-1].number),
            f"In {good[-LATEST_STEPS:].mean():.0%} of the groups every member is right: the problems are nearly "
            "used up.",
            "Stop here, take harder problems, or set difficulty_band=(0.2, 0.8), which retires solved problems and "
            "re-tests them now and then.",
            0.4,
            {
                "groups all right": float(good[-LATEST_STEPS:].mean()),
                "reward": float(np.mean(reward[-LATEST_STEPS:])),
            },
            shown(last[-1].samples),
        )
    ]
