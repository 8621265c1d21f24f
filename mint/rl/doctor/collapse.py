"""Collapse: one answer to everything, or no chance left in the answers, without the task being solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from mint.rl.doctor.evidence import Evidence, Step
from mint.rl.doctor.finding import Finding, shown
from mint.rl.doctor.statistics import SURE, change_of

LATEST_STEPS = 3
FEWEST_PROMPTS = 8
ONE_ANSWER, MORE_THAN_BEFORE = 0.6, 0.3
NO_CHANCE = 0.25
"""Of the entropy at the start; a policy that learns a task to 80 % keeps about a half on the bundled model."""
SOLVED = 0.8


def check(run: Evidence) -> list[Finding]:
    if len(run.steps) < 2 * LATEST_STEPS:
        return []
    last = run.steps[-LATEST_STEPS:]
    rewards = [s.reward for s in run.samples]
    mean_now = (
        float(np.mean([s.reward for step in last for s in step.samples])) if any(s.samples for s in last) else 0.0
    )
    if mean_now >= SOLVED * max(rewards, default=0.0) and mean_now > 0:
        return []
    return [finding for finding in (_same_answer(run, last), _entropy(run, mean_now)) if finding]


def _commonest(steps: Sequence[Step]) -> tuple[float, int]:
    """Share of the commonest answer among rollouts of different prompts, and how many prompts there were."""
    answers = Counter(s.completion_key for step in steps for s in step.samples)
    prompts = {s.prompt_key for step in steps for s in step.samples}
    return (answers.most_common(1)[0][1] / answers.total() if answers else 0.0), len(prompts)


def _same_answer(run: Evidence, last: Sequence[Step]) -> Finding | None:
    (now, prompts), (before, _) = _commonest(last), _commonest(run.steps[:2])
    if prompts < FEWEST_PROMPTS or now < ONE_ANSWER or (now < before + MORE_THAN_BEFORE and now < 0.95):
        return None
    return Finding(
        "same_answer",
        "alarm",
        (last[0].number, last[-1].number),
        f"{now:.0%} of the rollouts give one and the same answer whatever the question ({before:.0%} at the start).",
        "Look at what that answer earns: if it pays on average, the reward can be had without doing the task. Then go "
        "back to an earlier checkpoint with a smaller learning rate and kl_penalty_coef=0.05.",
        0.85,
        {"commonest answer": now, "at the start": before, "different prompts": prompts},
        shown(last[-1].samples),
    )


def _entropy(run: Evidence, reward: float) -> Finding | None:
    surprise = change_of(run, "surprise")
    if surprise is None or surprise.sure > -SURE or surprise.after > NO_CHANCE * surprise.before:
        return None
    return Finding(
        "collapse",
        "warning",
        run.span,
        f"The entropy of the answers fell from {surprise.before:.2g} to {surprise.after:.2g} nats a token while the "
        f"reward is only {reward:.2f}: the policy has stopped trying other answers.",
        "A smaller learning rate, entropy_coef=0.01, kl_penalty_coef=0.05, temperature 1.0, or go back to an earlier "
        "checkpoint.",
        0.7,
        {"entropy before": surprise.before, "entropy after": surprise.after, "reward": reward},
        shown(run.steps[-1].samples),
    )
