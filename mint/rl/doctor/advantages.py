"""Advantages that do not belong to the rollouts they were sent with, and tokens left out of the loss."""

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


def check(run: Evidence) -> list[Finding]:
    return [finding for finding in (_wrong_sample(run), _uneven(run), _kl_outweighs(run)) if finding]


def _wrong_sample(run: Evidence) -> Finding | None:
    kl = bool(run.config.get("kl_penalty_coef"))
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
    """The penalty spreads the advantages of one answer's tokens, which without it are all alike."""
    coefficient = run.config.get("kl_penalty_coef") or 0.0
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
        f"With kl_penalty_coef={coefficient:g} the penalty moves advantages by {share:.1f} times what the reward "
        "makes of them: the policy is trained to stay where it is rather than to earn more.",
        "Divide the coefficient by ten; 0.01 to 0.1 is usual.",
        0.9,
        {"penalty against reward": share, "kl_penalty_coef": coefficient},
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


def _uneven(run: Evidence) -> Finding | None:
    trained = [s for s in run.samples if s.sent is not None]
    uneven = [s for s in trained if s.uneven]
    if len(trained) < FEWEST_TRAINED or len(uneven) < 0.5 * len(trained):
        return None
    return Finding(
        "mask",
        "alarm",
        run.span,
        f"In {len(uneven) / len(trained):.0%} of the trained answers some sampled tokens were sent without an "
        "advantage and others with one: the mask is shifted against the tokens.",
        "Targets are the tokens moved by one: input = tokens[:-1], target = tokens[1:], and mask, advantages and "
        "log-probs must be moved the same way.",
        0.95,
        {"answers with a hole in the mask": len(uneven) / len(trained)},
        shown(uneven),
    )
