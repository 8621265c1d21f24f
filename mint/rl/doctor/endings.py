"""How answers end: cut off, never stopping, or stopping at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mint.rl.doctor.evidence import END, Evidence, Sample
from mint.rl.doctor.finding import Finding, Severity, shown
from mint.rl.doctor.statistics import SURE

FEWEST = 32
"""Rollouts; a share of one half is then known to within 0.09, and the limits below are far from each other."""
NEARLY_ALL = 0.9
MANY = 0.3
RECENT = 256
SOME, WORSE = 0.1, 0.5
HARMLESS = 0.8
"""Cut-off answers that earn this share of what whole ones do lose nothing that the grader looks at."""


def check(run: Evidence) -> list[Finding]:
    samples = run.samples[-RECENT:]
    if len(samples) < FEWEST:
        return []
    span = samples[0].step, samples[-1].step
    return [f for f in (_cut_off(run, span, samples), _at_once(span, samples) or _early(span, samples)) if f]


def _cut_off(run: Evidence, span: tuple[int, int], samples: Sequence[Sample]) -> Finding | None:
    cut = [s for s in samples if s.cut_off]
    share = len(cut) / len(samples)
    ended_inside = [s for s in cut if s.end_inside]
    limit = run.config.get("max_tokens", "?")
    if share >= 0.5 and len(ended_inside) >= 0.5 * len(cut):
        return Finding(
            "stop_token_missing",
            "alarm",
            span,
            f"{share:.0%} of the answers run into max_tokens={limit}, and most of them contain the model's own end "
            "token and go on after it: the end token is not among the stops.",
            "Add the tokenizer's end-of-turn token to the stop condition the environment returns (stop=None leaves it "
            "to the server, stop=[] turns all stops off).",
            0.97,
            {"cut off": share, "with an end token inside": len(ended_inside) / len(cut)},
            shown(ended_inside),
        )
    if share < MANY:
        return None
    earned = float(np.mean([s.reward for s in cut]))
    whole = float(np.mean([s.reward for s in samples if not s.cut_off])) if len(cut) < len(samples) else None
    figures: dict[str, float | str] = {"cut off": share, "reward of those": earned, "max_tokens": str(limit)}
    if whole is not None:
        figures["reward of the others"] = whole
    harmless = whole is not None and earned >= HARMLESS * whole > 0
    severity: Severity = "notice" if harmless else "alarm" if share >= NEARLY_ALL else "warning"
    return Finding(
        "truncated",
        severity,
        span,
        f"{share:.0%} of the answers are cut off at max_tokens={limit} before they end"
        + (", though that costs them no reward." if harmless else ", so what is graded is a fragment."),
        "Raise max_tokens; if answers ramble on, check that the model's end token is a stop, or set overlong_buffer. "
        "mask_truncated=True keeps fragments out of training.",
        0.3 if harmless else 0.85 if share >= NEARLY_ALL else 0.7,
        figures,
        shown(cut),
    )


def _at_once(span: tuple[int, int], samples: Sequence[Sample]) -> Finding | None:
    empty = [s for s in samples if s.length <= 1 and not s.cut_off]
    share = len(empty) / len(samples)
    if share < NEARLY_ALL or float(np.mean([s.reward for s in empty])) > 0.5:
        return None
    return Finding(
        "stops_at_once",
        "alarm",
        span,
        f"{share:.0%} of the answers end with their first token: something every answer begins with counts as a "
        "stop, or the prompt already looks finished to the model.",
        "Look at the stop condition of the environment (a space or newline among the stops?) and at the end of the "
        "prompt (an end token already there, a missing generation prompt?).",
        0.95,
        {"answers of at most one token": share},
        shown(empty),
    )


def _early(span: tuple[int, int], samples: Sequence[Sample]) -> Finding | None:
    """Answers that a stop cuts short, beside others that the model ended itself."""
    ended = [s for s in samples if s.ended_by == END]
    stopped = [s for s in samples if s.ended_by not in ("", END)]
    if min(len(ended), len(stopped)) < FEWEST // 2:
        return None
    earned, usual = (float(np.mean([s.reward for s in some])) for some in (stopped, ended))
    spread = float(np.std([s.reward for s in samples])) * math.sqrt(1 / len(ended) + 1 / len(stopped))
    costly = usual - earned > SURE * spread and usual - earned > WORSE * abs(usual)
    inside = [s for s in stopped if s.ended_by[-1:].isalnum()]  # stops are made of marks and line ends, not of words
    if not costly and (len(inside) < SOME * len(samples) or len(ended) < len(stopped)):
        return None
    piece, count = Counter(s.ended_by for s in stopped).most_common(1)[0]
    return Finding(
        "stops_early",
        "alarm" if costly else "warning",
        span,
        f"{len(stopped) / len(samples):.0%} of the answers end at a stop that is not the model's end token, most "
        f"often at {piece!r}, and earn {earned:.2f} where answers the model ended itself earn {usual:.2f}: they "
        f"{'are' if costly else 'may be'} cut off in the middle.",
        "Look at the stop strings and token ids in the sampling parameters; only what never stands inside an answer "
        "may be among them.",
        0.95,
        {
            "ended by a stop": len(stopped) / len(samples),
            f"of these at {piece!r}": count / len(stopped),
            "reward of those": earned,
            "reward of the others": usual,
        },
        shown(stopped),
    )
