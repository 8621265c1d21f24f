"""Rewards of an unusual size or side."""

from __future__ import annotations

import numpy as np

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown

FEWEST = 32
SMALL, LARGE = 0.005, 20.0
"""Of the typical advantage; rewards between 0 and 1 make advantages of about a half."""


def check(run: Evidence) -> list[Finding]:
    return [finding for finding in (_scale(run), _never_positive(run)) if finding]


def _scale(run: Evidence) -> Finding | None:
    known = [s for s in run.samples if s.advantage]
    if len(known) < FEWEST:
        return None
    typical = float(np.median([abs(s.advantage or 0.0) for s in known]))
    if SMALL <= typical <= LARGE:
        return None
    large = typical > LARGE
    return Finding(
        "reward_scale",
        "warning",
        run.span,
        f"Advantages are typically {typical:.2g} where about 0.5 is usual: rewards are on a scale of their own. Adam "
        "takes steps of the same size whatever the scale, but "
        + (
            "against such advantages a KL penalty counts for nothing, and clipping cuts every gradient."
            if large
            else "against such advantages a KL penalty or weight decay outweighs everything, and Adam's eps may too."
        ),
        "Scale rewards to between 0 and 1 (percent divided by 100, say), or use advantage='group_std'.",
        0.85,
        {"typical advantage": typical, "range of rewards": run.reward_range},
        shown(sorted(known, key=lambda s: -abs(s.advantage or 0.0))),
    )


def _never_positive(run: Evidence) -> Finding | None:
    rewards = [s.reward for s in run.samples]
    if len(rewards) < FEWEST or max(rewards) > 0 or min(rewards) == 0:
        return None
    best = sorted(run.samples, key=lambda s: -s.reward)
    return Finding(
        "never_positive",
        "notice",
        run.span,
        "No answer ever earns more than 0. That is right for a pure penalty; it is also what a reward with the wrong "
        "sign looks like.",
        "Read the best and the worst answer below: if the worst one is right, the sign is flipped.",
        0.45,
        {"highest reward": max(rewards), "lowest": min(rewards)},
        shown([best[0], best[-1]]),
    )
