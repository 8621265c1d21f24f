"""No learning signal: groups whose members all earn the same, and why."""

from __future__ import annotations

import math

import numpy as np

from mint.rl.data_processing import REWARD_TOLERANCE
from mint.rl.doctor.evidence import Evidence, Sample, Step
from mint.rl.doctor.finding import Finding, shown
from mint.rl.metrics import GOOD_REWARD

FEWEST_GROUPS = 16
"""If every second group had signal, so many in a row without would be chance once in 65,536 times."""
LATEST_STEPS = 10
FEW = 0.15
"""Share of groups with signal below which most of the sampling is for nothing."""
COLD = 0.1
"""A temperature at which the likeliest token is nearly always taken."""


def check(run: Evidence) -> list[Finding]:
    steps = _latest(run)
    groups = [group for step in steps for group in step.groups]
    if not groups or len(groups) < FEWEST_GROUPS:
        return []
    span = steps[0].number, steps[-1].number
    if max(map(len, groups)) == 1:
        return [_group_of_one(span, groups)]
    findings = [f for f in (_identical(span, groups),) if f]
    mixed = [group for group in groups if _has_signal(group)]
    if findings or len(mixed) + 2 * math.sqrt(len(mixed) + 1) > FEW * len(groups):
        return findings
    return [_without(run, span, groups, len(mixed) / len(groups))]


def _latest(run: Evidence) -> list[Step]:
    """The last steps, as few as make a judgement; up to ten."""
    steps: list[Step] = []
    for step in reversed(run.steps):
        if len(steps) >= LATEST_STEPS or (len(steps) >= 3 and sum(len(s.groups) for s in steps) >= 2 * FEWEST_GROUPS):
            break
        steps.insert(0, step)
    return steps


def _has_signal(group: list[Sample]) -> bool:
    rewards = [sample.reward for sample in group]
    return max(rewards) - min(rewards) > REWARD_TOLERANCE


def _group_of_one(span: tuple[int, int], groups: list[list[Sample]]) -> Finding:
    return Finding(
        "group_of_one",
        "alarm",
        span,
        "Every group has one member. A member is compared with its own group, so its advantage is always 0 and nothing "
        "is ever learnt.",
        "Give each problem several rollouts: group size (num_envs) 4 to 16.",
        0.99,
        {"groups": len(groups), "members a group": 1},
        shown(group[0] for group in groups),
    )


def _identical(span: tuple[int, int], groups: list[list[Sample]]) -> Finding | None:
    """Members that say the same although the policy is unsure, or because they are drawn without chance."""
    several = [group for group in groups if len(group) > 1]
    same = [group for group in several if len({s.completion_key for s in group}) == 1]
    share = len(same) / len(several)
    temperature = max(s.temperature for group in groups for s in group)
    rates = [np.mean([s.reward for s in group]) >= GOOD_REWARD for group in same]
    undecided = same and 0.1 < np.mean(rates) < 0.9
    surprise = float(np.mean([s.surprise for group in same for s in group])) if same else 0.0
    # A solved or collapsed task also has equal members; here some problems come out right and others wrong, each to the
    # last member, which honest draws do not do when the policy is unsure.
    if share < 0.9 or not (temperature <= COLD or (undecided and surprise > 0.05)):
        return None
    cold = temperature <= COLD
    cause = f"The temperature is {temperature:g}" if cold else "The members of a group seem to share one random seed"
    return Finding(
        "identical_samples",
        "alarm",
        span,
        f"In {share:.0%} of the groups all members gave the same answer, so there is nothing to compare. {cause}.",
        "Sample at temperature 0.7 to 1.0." if cold else "Give each member its own random stream, or send no seed.",
        0.95,
        {"groups of equal answers": share, "temperature": temperature, "entropy in nats a token": surprise},
        shown(same[0]),
    )


def _without(run: Evidence, span: tuple[int, int], groups: list[list[Sample]], mixed: float) -> Finding:
    flat = [sample for group in groups if not _has_signal(group) for sample in group]
    right = float(np.mean([sample.reward >= GOOD_REWARD for sample in flat]))
    began = [group for step in run.steps[:3] for group in step.groups]
    began_right = float(np.mean([not _has_signal(group) and group[0].reward >= GOOD_REWARD for group in began]))
    figures: dict[str, float | str] = {
        "groups": len(groups),
        "with signal": mixed,
        "right": right,
        "mean reward": float(np.mean([s.reward for s in flat])),
    }
    if right > 0.8:
        from_start = began_right > 0.8
        return Finding(
            "all_right",
            "alarm" if from_start and mixed < 0.02 else "warning" if from_start else "notice",
            span,
            f"{right:.0%} of the groups without signal are right to the last member"
            + (", and were so from the first step: there is nothing to learn here, or the grader accepts anything."
               if from_start else ": the task is solved."),
            "Read the two answers: if they are wrong, mend the grader; if they are right, take harder problems "
            "(difficulty_band keeps to those that still teach).",
            0.9 if from_start else 0.5,
            figures,
            shown(flat),
        )  # fmt: skip
    if right < 0.2:
        reward = figures["mean reward"]
        return Finding(
            "all_wrong",
            "alarm" if mixed < 0.02 else "warning",
            span,
            f"Hardly any answer earns anything: {1 - right:.0%} of the groups without signal earn {reward:.3g} to the "
            "last member, so there is nothing to prefer.",
            "Read the two rollouts. A prompt that is not what you wrote: another tokenizer or template. Right answers "
            "without reward: the grader, or a reference that belongs to another question. Wrong answers: easier "
            "problems, worked examples in the prompt, partial credit, larger groups, or a supervised warm-up first.",
            0.8,
            figures,
            shown(flat),
        )
    return Finding(
        "few_groups_with_signal",
        "warning",
        span,
        f"Only {mixed:.0%} of the groups have members that earn different rewards; the others teach nothing.",
        "Larger groups, partial credit, or difficulty_band=(0.2, 0.8) to keep to problems that still teach.",
        0.6,
        figures,
        shown(flat),
    )
