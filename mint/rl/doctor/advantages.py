"""Advantages and datums that do not belong to the rollouts they were sent with. Which tokens have one: `mask`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mint.rl.data_processing import REWARD_TOLERANCE
from mint.rl.doctor.evidence import Evidence, Sample
from mint.rl.doctor.finding import Finding, shown

FEWEST_PAIRS = 20
WRONG = 0.05
"""Share of pairs in the wrong order. Every estimator is monotone in the reward, so a right loop has none; a KL penalty
shifts what is sent, and then a quarter is allowed."""
WRONG_WITH_KL = 0.25
FEWEST_TRAINED = 16
FEWEST_GROUPS = 12
ONE_SIDED = 0.8
"""Share of groups whose advantages all have one sign; a baseline taken within the group leaves none."""
MANY_DROPPED = 0.2
TERMS = {
    "kl_penalty_coef": "the policy is trained to stay where it is rather than to earn more",
    "entropy_coef": "the policy is trained to answer at random rather than to earn more",
}
"""What is added to advantages token by token, and what it comes to if there is too much of it."""
FOREIGN = 0.3


def check(run: Evidence) -> list[Finding]:
    found = (_wrong_sample(run), _one_sided(run), _dropped(run), _foreign(run), _kl_outweighs(run))
    return [finding for finding in found if finding]


def _wrong_sample(run: Evidence) -> Finding | None:
    kl = any(run.config.get(name) for name in TERMS)
    for what, value, limit in (
        ("given", lambda s: s.advantage, WRONG),
        ("sent", lambda s: s.sent, WRONG_WITH_KL if kl else WRONG),
    ):
        pairs, wrong = _pairs(run, value)
        share = len(wrong) / pairs if pairs else 0.0
        if pairs < FEWEST_PAIRS or share < limit:
            continue
        flipped = share > 0.95
        return Finding(
            "wrong_advantage",
            "alarm",
            run.span,
            f"In {share:.0%} of the pairs within a group the rollout with the higher reward was {what} the lower "
            "advantage: "
            + ("the sign of the advantages is flipped." if flipped else "advantages reach the wrong rollouts."),
            "Look at how advantages are put together with trajectories: "
            + ("a minus too many, or a loss that is minimised." if flipped else
               "one list filtered, sorted or shifted without the other."),
            0.99,
            {"pairs": pairs, "in the wrong order": share},
            shown(wrong[0]),
        )  # fmt: skip
    return None


def _kl_outweighs(run: Evidence) -> Finding | None:
    """Terms spread the advantages of one answer's tokens, which without them are all alike."""
    name, coefficient = max(((name, run.config.get(name) or 0.0) for name in TERMS), key=lambda term: term[1])
    trained = [s for s in run.samples if s.sent is not None]
    weight = float(np.sum([abs(s.advantage or 0.0) for s in trained]))
    if not coefficient or len(trained) < FEWEST_TRAINED or not weight:
        return None
    share = float(np.sum([s.sent_spread for s in trained])) / weight
    if share < 1:
        return None
    return Finding(
        "kl_outweighs_reward",
        "warning",
        run.span,
        f"With {name}={coefficient:g} its term moves advantages by {share:.1f} times what the reward makes of them: "
        f"{TERMS[name]}.",
        "Divide the coefficient by ten; 0.01 to 0.1 is usual for KL, 0.001 to 0.05 for entropy.",
        0.9,
        {"term against reward": share, name: coefficient},
        shown(sorted(trained, key=lambda s: -s.sent_spread)),
    )


def _pairs(run: Evidence, value: Callable[[Sample], float | None]) -> tuple[int, list[tuple[Sample, Sample]]]:
    """How many pairs differ in reward, and those of them whose advantages are in the opposite order."""
    count, wrong = 0, []
    for step in run.steps:
        for group in step.groups:
            known = [(s, a) for s in group if (a := value(s)) is not None]
            for i, (better, high) in enumerate(known):
                for other, low in known[i + 1 :]:
                    if abs(better.reward - other.reward) <= REWARD_TOLERANCE:
                        continue
                    count += 1
                    if (high - low) * (better.reward - other.reward) < 0:
                        wrong.append((better, other))
    return count, wrong


def _one_sided(run: Evidence) -> Finding | None:
    """Advantages that are not taken against the group: right and wrong answers pushed the same way."""
    known = [
        [(s, s.advantage) for s in group if s.advantage is not None] for step in run.steps for group in step.groups
    ]
    known = [group for group in known if len(group) > 1]
    sided = [group for group in known if len({a > 0 for _, a in group}) == 1 and all(a for _, a in group)]
    if len(known) < FEWEST_GROUPS or len(sided) < ONE_SIDED * len(known):
        return None
    up = sum(a > 0 for group in sided for _, a in group) > sum(a < 0 for group in sided for _, a in group)
    return Finding(
        "one_sided_advantages",
        "alarm",
        run.span,
        f"In {len(sided) / len(known):.0%} of the groups every member was given a {'positive' if up else 'negative'} "
        f"advantage: all answers are made {'more' if up else 'less'} likely, right and wrong alike.",
        "Subtract the mean reward of the group from each reward (advantage = reward - mean); a constant added to "
        "every reward then does no harm either.",
        0.95,
        {
            "groups with one sign": len(sided) / len(known),
            "mean advantage": float(np.mean([a for group in sided for _, a in group])),
        },
        shown(sorted((s for s, _ in sided[0]), key=lambda s: s.reward)),
    )


def _dropped(run: Evidence) -> Finding | None:
    """Rollouts that differ from their group in reward and never reached the trainer, while others did."""
    masked = bool(run.config.get("mask_truncated"))
    trained: list[tuple[Sample, float]] = []
    dropped: list[tuple[Sample, float]] = []
    for step in run.steps:
        if not any(s.trained for s in step.samples):
            continue
        for group in step.groups:
            mean = float(np.mean([s.reward for s in group]))
            for s in group:
                if abs(s.reward - mean) <= REWARD_TOLERANCE or not s.length or (masked and s.cut_off):
                    continue
                (trained if s.trained else dropped).append((s, s.reward - mean))
    dropped = [(s, a) for s, a in dropped if s.advantage != 0]
    share = len(dropped) / max(len(dropped) + len(trained), 1)
    if len(dropped) < FEWEST_TRAINED or share < MANY_DROPPED:
        return None
    above = float(np.mean([a > 0 for _, a in dropped]))
    which = (
        " Nearly all of them are worse than their group, so nothing is ever discouraged." if above < 0.1
        else " Nearly all of them are better than their group, so nothing is ever encouraged." if above > 0.9
        else ""
    )  # fmt: skip
    return Finding(
        "dropped_rollouts",
        "alarm" if which else "warning",
        run.span,
        f"{share:.0%} of the rollouts that differ from their group in reward never reached the trainer.{which}",
        "Follow the list of datums from where it is made to forward_backward: a filter, a slice or a batch limit takes "
        "some away. If that is meant (a filter of yours), leave out whole groups rather than members.",
        0.9,
        {"left out": share, "rollouts": len(dropped), "better than their group": above},
        shown(s for s, _ in dropped),
    )


def _foreign(run: Evidence) -> Finding | None:
    """Own loops only: `mint.rl.recorder` counts the datums that are no rollout of their step."""
    _, unknown = run.series("train/unknown_datums")
    _, sent = run.series("train/datums")
    if len(unknown) < 3 or len(unknown) != len(sent) or unknown.sum() < max(FEWEST_TRAINED, FOREIGN * sent.sum()):
        return None
    share = float(unknown.sum() / sent.sum())
    return Finding(
        "foreign_datums",
        "alarm" if share > 0.9 else "warning",
        run.span,
        f"{share:.0%} of the sequences sent to the trainer are not, token by token, what was sampled in that step: "
        "the trainer learns from tokens the policy did not choose.",
        "Build datums from the prompt's tokens and sequence.tokens as they came; decoding and encoding again, "
        "stripping, or cutting a text changes the tokens under their log-probs. Old rollouts used again, as from a "
        "replay buffer, look the same here, and are then no fault.",
        0.96,
        {"datums that were not sampled": share, "of datums": float(sent.sum())},
        shown(run.steps[-1].samples),
    )
