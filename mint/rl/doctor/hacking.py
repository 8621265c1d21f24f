"""Reward hacking: the trained reward rises and what it stands for does not; answers grow long or repeat themselves."""

from __future__ import annotations

import math

import numpy as np

from mint.rl.doctor.evidence import Evidence, Sample
from mint.rl.doctor.finding import Finding, shown
from mint.rl.doctor.grading import ERROR_TERM, SUCCESS_TERM
from mint.rl.doctor.statistics import SURE, Change, change_of, correlation, holdout_change
from mint.rl.metrics import GOOD_REWARD

A_LOT = 0.1
"""Of the range of rewards."""
FLAT = 0.5
"""A second measure that rose by less than half of what the reward did, even if it is 2.5 standard errors better than it
looks, does not follow."""
MARGIN = 2.5
CEILING = 0.9
"""A measure that began here cannot rise with the reward."""
LONGER = 1.3
REPEATING, MORE_THAN_BEFORE = 0.5, 0.3


def check(run: Evidence) -> list[Finding]:
    found = (_second_measure(run), _length(run), _repetition(run))
    return [finding for finding in found if finding]


def _second_measure(run: Evidence) -> Finding | None:
    trained = change_of(run, "reward")
    if trained is None or trained.sure < MARGIN or trained.size < A_LOT * run.reward_range:
        return None
    for name, change in _others(run).items():
        fell = change.sure < -MARGIN and change.size < -A_LOT
        if change.before > CEILING or change.size + MARGIN * change.error > FLAT * trained.size:
            continue
        if trained.sure < SURE and not fell:  # two likely movements in opposite directions are as sure as one
            continue
        return Finding(
            "reward_hacking",
            "alarm",
            run.span,
            f"The trained reward rose from {trained.before:.2f} to {trained.after:.2f}, and {name} went from "
            f"{change.before:.2f} to {change.after:.2f}: the policy found a way to the reward that is not the task.",
            "Read the two best-paid answers below and close the way they show; give the reward a second, independent "
            "term; keep kl_penalty_coef above 0. If the training set is small, it may also be learning it by heart.",
            0.9,
            {"reward gained": trained.size, "in standard errors": trained.sure, f"{name} gained": change.size},
            shown(_suspicious(run)),
        )
    return None


def _others(run: Evidence) -> dict[str, Change]:
    """Measures of the same thing that are not what is trained on."""
    others: dict[str, Change | None] = {"the holdout's reward": holdout_change(run)}
    names = {name for s in run.samples for name in s.terms if SUCCESS_TERM.search(name) and not ERROR_TERM.search(name)}
    for name in sorted(names):
        values = [s.terms.get(name, math.nan) for s in run.samples]
        if not np.allclose(values, [s.reward for s in run.samples], equal_nan=True):
            others[f"the term {name!r}"] = change_of(run, name)
            others[f"the holdout's {name!r}"] = holdout_change(run, name)
    known = [s for s in run.samples if s.agrees is not None]
    if known and any(s.agrees != (s.reward >= GOOD_REWARD) for s in known):
        others["the share of answers with the reference"] = change_of(run, "agrees")
    return {name: change for name, change in others.items() if change is not None}


def _suspicious(run: Evidence) -> list[Sample]:
    """Well paid and, where that is known, not right."""
    return sorted(run.steps[-1].samples, key=lambda s: (-s.reward, bool(s.agrees)))


def _length(run: Evidence) -> Finding | None:
    length = change_of(run, "length")
    if length is None or abs(length.sure) < SURE or length.size < 2:
        return None
    if length.after < LONGER * length.before:
        return None
    pays = correlation([float(s.length) for s in run.samples], [s.reward for s in run.samples])
    successes = [change for name, change in _others(run).items() if "holdout's reward" not in name]
    rewarded = change_of(run, "reward")
    explained = any(c.sure > SURE for c in successes)
    paid = pays is not None and pays > 0.5 and not explained and rewarded is not None and rewarded.sure > 0
    return Finding(
        "length_drift",
        "warning" if paid else "notice",
        run.span,
        f"Answers grew from {length.before:.1f} to {length.after:.1f} tokens"
        + (
            f", and longer ones earn more (correlation {pays:.2f}): the reward may be paying for length."
            if paid
            else "."
        ),
        "Grade a right short answer and a wrong long one by hand; a length penalty (overlong_buffer) or a reward per "
        "answer instead of per token takes the incentive away.",
        0.75 if paid else 0.3,
        {"tokens before": length.before, "tokens after": length.after, "correlation with reward": pays or 0.0},
        shown(sorted(run.steps[-1].samples, key=lambda s: -s.length)),
    )


def _repetition(run: Evidence) -> Finding | None:
    if len(run.steps) < 4:
        return None
    first = [s.repeats for step in run.steps[:2] for s in step.samples]
    last = [s for step in run.steps[-3:] for s in step.samples]
    repeating = [s for s in last if s.repeats]
    if len(last) < 32 or not first or len(repeating) < REPEATING * len(last):
        return None
    before, now = float(np.mean(first)), len(repeating) / len(last)
    if now < before + MORE_THAN_BEFORE:
        return None
    return Finding(
        "repetition",
        "alarm" if now > 0.8 else "warning",
        (run.steps[-3].number, run.steps[-1].number),
        f"{now:.0%} of the answers repeat one piece over and over ({before:.0%} at the start).",
        "Look at what a repeating answer earns; penalise repetition in the reward, lower the learning rate, or go back "
        "to a checkpoint before it began.",
        0.8,
        {"repeating now": now, "at the start": before},
        shown(repeating),
    )
