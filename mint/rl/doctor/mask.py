"""Which tokens of a rollout count in the loss: all that were sampled, and none else."""

from __future__ import annotations

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown

FEWEST_TRAINED = 16
UNSAMPLED = 0.02
"""Of the sampled tokens that were trained on."""
LAST_TURN_ONLY = 0.9


def check(run: Evidence) -> list[Finding]:
    found = (_uneven(run), _unsampled(run), _last_turn_only(run))
    return [finding for finding in found if finding]


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


def _unsampled(run: Evidence) -> Finding | None:
    """Own loops only: `mint.rl.recorder` counts the tokens that were sent with an advantage and nobody sampled."""
    _, unsampled = run.series("train/unsampled_tokens")
    trained = [s for s in run.samples if s.sent is not None]
    tokens = sum(s.length for s in trained)
    if len(trained) < FEWEST_TRAINED or unsampled.sum() < UNSAMPLED * tokens:
        return None
    turns = any(s.turns > 1 for s in trained)
    return Finding(
        "mask",
        "alarm",
        run.span,
        f"{unsampled.sum():.0f} tokens were sent with an advantage that the policy did not sample, beside {tokens} it "
        f"did sample: {'what the environment or a tool said' if turns else 'the prompt'} is in the loss.",
        "Give an advantage to sampled tokens only: 0 over the prompt"
        + (" and over everything between two turns of the model." if turns else "."),
        0.95,
        {"tokens not sampled": float(unsampled.sum()), "tokens sampled": tokens},
        shown(sorted(trained, key=lambda s: -s.turns)),
    )


def _last_turn_only(run: Evidence) -> Finding | None:
    episodes = [s for s in run.samples if s.turns > 1 and s.sent]
    last = [s for s in episodes if s.last_turn_only]
    if len(episodes) < FEWEST_TRAINED or len(last) < LAST_TURN_ONLY * len(episodes):
        return None
    return Finding(
        "mask",
        "warning",
        run.span,
        f"In {len(last) / len(episodes):.0%} of the trained episodes of several turns only the last turn has an "
        "advantage: what the model did before it, such as a tool call, is neither encouraged nor discouraged.",
        "Give every turn of the model the advantage of its episode, in one datum where each prompt continues the last "
        "turn, else in a datum for each turn.",
        0.9,
        {"episodes": len(episodes), "with nothing but the last turn": len(last) / len(episodes)},
        shown(last),
    )
