"""The few tests behind the doctor's judgement, and how often they cry wolf.

A report asks some thirty questions, and a live run asks them again every few steps. So a single comparison of noisy
means must be beyond `SURE` = 4 standard errors (one in 30,000 by chance, one-sided) before it counts: thirty questions
asked forty times are then wrong about four times in a hundred runs at the worst, and the looks are far from
independent. Differences must also be large enough to matter. Small samples have large standard errors, so they say
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mint.rl.doctor.evidence import Evaluation, Evidence, Sample

SURE = 4.0
"""Standard errors."""
WINDOW_STEPS = 10
"""Steps at either end of a window that are compared, at most; a third of it if shorter."""
OF_A_MEDIAN = math.sqrt(math.pi / 2)
"""How much larger a median's standard error is than a mean's."""
FEWEST_STEPS = 6
"""Below this there is no beginning and end to compare."""


@dataclass(frozen=True)
class Change:
    """Of a mean, from the first steps to the last."""

    before: float
    after: float
    error: float
    """Standard error of the difference."""

    @property
    def size(self) -> float:
        return self.after - self.before

    @property
    def sure(self) -> float:
        """In standard errors, signed."""
        return self.size / self.error if self.error > 0 else math.copysign(math.inf, self.size) if self.size else 0.0


def change_of_values(values: Sequence[float], errors: Sequence[float] | None = None) -> Change | None:
    """Last third against first third of values a step, each without the step farthest from its median, so that one odd
    step is no trend. Without known errors they are taken from the scatter of neighbouring steps, to which a slow trend
    adds nothing."""
    if len(values) < FEWEST_STEPS:
        return None
    n = min(len(values) // 3, WINDOW_STEPS)
    series = np.asarray(values, dtype=np.float64)
    if errors is None:
        step_error = np.full(len(series), np.std(np.diff(series)) / math.sqrt(2))
    else:
        step_error = np.asarray(errors, dtype=np.float64)
    (before, error_before), (after, error_after) = (
        _trimmed(series[part], step_error[part]) for part in (slice(n), slice(-n, None))
    )
    return Change(before, after, math.hypot(error_before, error_after))


def _trimmed(values: np.ndarray, errors: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error without the farthest value; of three or fewer the median."""
    if len(values) <= 3:
        return float(np.median(values)), OF_A_MEDIAN * math.sqrt((errors**2).sum()) / len(values)
    kept = np.delete(np.arange(len(values)), np.abs(values - np.median(values)).argmax())
    return float(values[kept].mean()), math.sqrt((errors[kept] ** 2).sum()) / len(kept)


def change_of(evidence: Evidence, value: str) -> Change | None:
    """Of a measure of `_value` or of a reward term, over the window. Groups are the independent draws, so a
    step's error comes from the spread of its group means. Groups that happen to be all alike are not certain either:
    the error is at least a quarter of what one group more at the other end of the range would change."""
    steps = [[[_value(s, value) for s in group] for group in step.groups] for step in evidence.steps]
    means_P = [[m for m in (sum(group) / len(group) for group in groups) if not math.isnan(m)] for groups in steps]
    means_P = [means for means in means_P if len(means) > 1]
    known = [mean for means in means_P for mean in means]
    spread = max(known) - min(known) if known else 0.0
    values = [float(np.mean(means)) for means in means_P]
    if not evidence.complete:
        return change_of_values(values)
    errors = [max(float(np.std(m, ddof=1)) / math.sqrt(len(m)), 0.25 * spread / len(m)) for m in means_P]
    return change_of_values(values, errors)


def _value(sample: Sample, name: str) -> float:
    if name in ("reward", "length", "surprise", "prompt_length"):
        return float(getattr(sample, name))
    if name == "reference_length":
        return math.nan if sample.reference is None else float(len(sample.reference))
    if name == "agrees":
        return math.nan if sample.agrees is None else float(sample.agrees)
    return float(sample.terms.get(name, math.nan))


@dataclass(frozen=True)
class PairedChange(Change):
    """The same problems before and after."""

    rose: int
    fell: int

    @property
    def chance_of_fall(self) -> float:
        """Sign test: how often at least so many of the problems that changed would fall if falls were as likely as
        rises."""
        return binomial_tail(self.fell, self.rose + self.fell)


def holdout_change(evidence: Evidence, term: str = "reward") -> PairedChange | None:
    """From the first evaluation to the last, problem by problem."""
    if len(evidence.evaluations) < 2:
        return None
    first, last = evidence.evaluations[0], evidence.evaluations[-1]
    pairs = [(a, last.by_place[place]) for place, a in first.by_place.items() if place in last.by_place]
    values = [(_value(a, term), _value(b, term)) for a, b in pairs]
    values = [(a, b) for a, b in values if not math.isnan(a) and not math.isnan(b)]
    if len(values) < 8 or first.version >= last.version:
        return None
    before, after = np.array(values).T
    difference = after - before
    error = max(float(np.std(difference, ddof=1)) / math.sqrt(len(difference)), 1 / len(difference))
    return PairedChange(
        float(before.mean()), float(after.mean()), error, int((difference > 0).sum()), int((difference < 0).sum())
    )


def binomial_tail(successes: int, trials: int) -> float:
    """Chance of at least so many heads in so many fair throws."""
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's; None for fewer than 30 pairs or where one side is constant."""
    if len(xs) < 30 or np.std(xs) == 0 or np.std(ys) == 0:
        return None
    return float(np.corrcoef(xs, ys)[0, 1])


def moved(first: Evaluation, last: Evaluation) -> tuple[float, int] | None:
    """How far the policy moved between two evaluations: the mean difference of log-probs, without sign, over the tokens
    that both answers to a problem begin with, and how many those are. In the same context only weights can differ."""
    differences = []
    for place, a in first.by_place.items():
        b = last.by_place.get(place)
        if b is None:
            continue
        for x, y, p, q in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=False):
            if x != y:
                break
            if p or q:  # tokens of the environment have none
                differences.append(abs(p - q))
    return (float(np.mean(differences)), len(differences)) if differences else None
