"""Breaking: the learning rate too large, the reward falling, and single steps that stick out."""

from __future__ import annotations

import math

import numpy as np

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown
from mint.rl.doctor.statistics import SURE, change_of, holdout_change, moved

LARGE_UPDATE = 0.1
"""Of the weights' norm in one step; what learns well moves by a per cent or two."""
A_LOT = 0.1
"""Of the range of rewards."""
LIKELY = 2.5
"""Standard errors of a rise that, together with a falling holdout, is another story: see `hacking`."""
SIGN_TEST = 1e-3
TORN = 1.0
"""Nats a token: on average every token's odds changed by a factor of e."""
# Metric, how many times its median is a spike, and below which value none is.
SPIKES: tuple[tuple[str, str, float, float], ...] = (
    ("optim/grad_norm", "gradient norm", 30.0, 0.0),  # a sure policy's rare mistakes reach 13 times in clean runs
    ("env/all/reward/total", "mean reward", 10.0, 2.0),
    ("train/ratio:max", "largest importance ratio", 10.0, 5.0),
    ("optim/kl_sample_train_v2", "KL between sampler and trainer", 10.0, 0.02),
    ("kl_policy_base", "KL to the reference", 10.0, 0.1),
    ("kl_pre_post_v2", "KL of one update", 10.0, 0.02),
)
CALM_STEPS = 5


def check(run: Evidence) -> list[Finding]:
    fell = _fell(run)
    found = [_learning_rate(run, fell), fell, *_spikes(run)]
    return [finding for finding in found if finding]


def _fell(run: Evidence) -> Finding | None:
    trained, held_out = change_of(run, "reward"), holdout_change(run)
    enough = -A_LOT * run.reward_range
    worse_trained = trained is not None and trained.sure < -SURE and trained.size < enough
    worse_held_out = held_out is not None and held_out.size < enough and held_out.chance_of_fall < SIGN_TEST
    rising = trained is not None and trained.sure > LIKELY
    if not worse_trained and (not worse_held_out or rising):
        return None
    figures: dict[str, float | str] = {}
    if trained:
        figures |= {"reward before": trained.before, "after": trained.after, "standard errors": abs(trained.sure)}
    if held_out:
        figures |= {"holdout before": held_out.before, "holdout after": held_out.after}
    said = trained if worse_trained else held_out
    assert said is not None
    return Finding(
        "reward_fell",
        "alarm",
        run.span,
        f"The {'reward' if worse_trained else 'holdout'} fell from {said.before:.2f} to {said.after:.2f}: the run "
        "gets worse as it trains.",
        "Go back to the last good checkpoint (mint bisect finds it; rollback=True does it in the loop), then a smaller "
        "learning rate, a clipped loss (ppo, cispo) or kl_penalty_coef=0.05, in this order.",
        0.75,
        figures,
        shown(run.steps[-1].samples),
    )


def _learning_rate(run: Evidence, fell: Finding | None) -> Finding | None:
    _, update = run.series("optim/update_norm")
    _, weight = run.series("optim/weight_norm")
    if not len(update) or len(update) != len(weight) or weight.min() <= 0:
        return None
    relative = float(np.median(update / weight))
    if relative < LARGE_UPDATE:
        return None
    distance = moved(run.evaluations[0], run.evaluations[-1]) if len(run.evaluations) > 1 else None
    surprise = change_of(run, "surprise")
    torn = distance is not None and distance[0] > TORN
    changed = (
        surprise is not None and abs(surprise.sure) > SURE and not 1 / 3 < _factor(surprise.before, surprise.after) < 3
    )
    broken = bool(fell) or torn or changed
    figures: dict[str, float | str] = {"update of the weights' norm in a step": relative}
    if distance:
        figures["moved, in nats a token"] = distance[0]
    if surprise:
        figures |= {"entropy before": surprise.before, "entropy after": surprise.after}
    return Finding(
        "learning_rate_large",
        "alarm" if broken else "notice",
        run.span,
        f"Every step changes the weights by {relative:.0%} of their size"
        + (", and the policy came apart: the learning rate is too large." if broken else "; that is a lot."),
        "Divide the learning rate by ten; grad_clip_norm and a warm-up help against single large steps, not against "
        "this.",
        0.95 if broken else 0.3,
        figures,
        shown(run.steps[-1].samples),
    )


def _factor(before: float, after: float) -> float:
    return (after + 1e-6) / (before + 1e-6)


def _spikes(run: Evidence) -> list[Finding]:
    """One finding for all metrics, at the step that sticks out most."""
    worst: tuple[float, int, str, float, float] | None = None
    for metric, name, times, least in SPIKES:
        numbers, values = run.series(metric)
        if len(values) <= CALM_STEPS:
            continue
        for i, value in enumerate(values):
            usual = float(np.median(np.delete(values, i)))
            factor = value / usual if usual > 0 else math.inf
            apart = i > 0 and value >= least and factor > times and math.isfinite(factor)
            if apart and (worst is None or factor > worst[0]):
                worst = (factor, numbers[i], name, float(value), usual)
    if worst is None:
        return []
    factor, number, name, value, usual = worst
    step = next(s for s in run.steps if s.number == number)
    return [
        Finding(
            "spike",
            "warning",
            (number, number),
            f"At step {number} the {name} is {factor:.0f} times its usual value: one batch pulled much harder than "
            "all others.",
            "Read that step's rollouts (rewards out of range? one very long answer?). grad_clip_norm=1 bounds what "
            "such a step can do, bounded rewards prevent it.",
            0.6,
            {name: value, "usually": usual},
            shown(sorted(step.samples, key=lambda s: -abs(s.advantage or 0.0))),
        )
    ]
