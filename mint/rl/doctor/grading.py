"""The grader: whether it fails, contradicts itself, rejects right answers or prefers wrong ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from mint.rl.doctor.evidence import Evidence, Sample, stands_in
from mint.rl.doctor.finding import Finding, shown
from mint.rl.doctor.statistics import correlation
from mint.rl.metrics import GOOD_REWARD

ERROR_TERM = re.compile(r"error|exception|crash|fail(ed|ure)|timeout", re.IGNORECASE)
SUCCESS_TERM = re.compile(
    r"correct|accura|\bacc\b|success|solved|right|pass|exact|match|gold|true|oracle|judge|grader|verif|quality|win",
    re.IGNORECASE,
)
"""Terms that measure what is wanted, by their name; others (format, cost, lengths) need not go with the reward."""
SOME_ERRORS, MANY_ERRORS = 0.05, 0.25
FEWEST_ROLLOUTS = 32
FULL, PAID = 0.95, 0.25
UNRELATED = 0.2
REJECTED, REJECTED_EXACT = 0.8, 0.3
"""The reference may stand in a wrong answer by chance; an answer that is nothing but the reference is right."""
FEWEST_PROBLEMS = 16
COMPARED_STEPS, COMPARED_GROUPS = 10, 12
"""Every answer with every reference of its step: enough of them to see, few enough for a look to stay cheap."""
FITS_ANOTHER = 0.2
COMMON = 0.05
"""If a further problem's reference fits as often as this, references are too few or too short to tell them apart."""
FEWEST_PAIRS = 20
"""Pairs of equal answers; were one in four graded differently by a fair coin, five or more would be."""


def check(run: Evidence) -> list[Finding]:
    found = [_errors(run), _contradicts(run), _sign(run), _other_references(run)]
    found += [_unrelated(run) or _pays_wrong(run) or _rejects_reference(run)]
    return [finding for finding in found if finding]


def success_of(sample: Sample) -> float | None:
    """What is known of an answer's worth beside its reward: a term that says so, or the reference in the response."""
    for name, value in sample.terms.items():
        if SUCCESS_TERM.search(name) and not ERROR_TERM.search(name) and value != sample.reward:
            return value
    if sample.agrees is not None:
        return float(sample.agrees)
    return next((v for name, v in sample.terms.items() if SUCCESS_TERM.search(name)), None)


def _errors(run: Evidence) -> Finding | None:
    lost = sum(step.metrics.get("rollout_errors/total", 0.0) for step in run.steps)
    rollouts = len(run.samples)
    terms = [s for s in run.samples if any(ERROR_TERM.search(name) and value for name, value in s.terms.items())]
    attempts = rollouts + lost
    share = (lost + len(terms)) / attempts if attempts else 0.0
    if attempts < FEWEST_ROLLOUTS or share < SOME_ERRORS:
        return None
    kinds: dict[str, float] = defaultdict(float)
    for step in run.steps:
        for name, value in step.metrics.items():
            kind = name.removeprefix("rollout_errors/")
            if kind != name and kind not in ("total", "groups_skipped"):
                kinds[kind] += value
    for sample in terms:
        for name, value in sample.terms.items():
            if ERROR_TERM.search(name) and value:
                kinds[name] += 1
    most = max(kinds, key=lambda kind: kinds[kind]) if kinds else "unknown"
    return Finding(
        "grader_errors",
        "alarm" if share >= MANY_ERRORS else "warning",
        run.span,
        f"{share:.0%} of the rollouts fail in the environment or the grader, mostly with {most}: they are lost or "
        "graded as wrong, whatever the answer was.",
        f"Call the grader on the two answers by hand and mend {most}; logs.log has the messages. Leaving failures out "
        "also biases training towards what is easy to grade.",
        0.95 if share >= MANY_ERRORS else 0.7,
        {"failed": share, "of rollouts": attempts} | {f"{kind}": count for kind, count in list(kinds.items())[:4]},
        shown([*terms, *run.samples]),
    )


def _contradicts(run: Evidence) -> Finding | None:
    """Equal answers to one problem, in one group, with different rewards."""
    pairs: list[tuple[Sample, Sample]] = []
    for step in run.steps:
        for group in step.groups:
            by_answer: dict[int, list[Sample]] = defaultdict(list)
            for sample in group:
                by_answer[sample.completion_key].append(sample)
            pairs += [(same[0], other) for same in by_answer.values() for other in same[1:]]
    rewards = [s.reward for s in run.samples]
    if len(pairs) < FEWEST_PAIRS or np.std(rewards) == 0:
        return None
    # By how much equal answers differ, against how much any two answers differ; a judge's small noise stays small here.
    apart = float(np.mean([(a.reward - b.reward) ** 2 for a, b in pairs])) / (2 * float(np.var(rewards)))
    different = [pair for pair in pairs if abs(pair[0].reward - pair[1].reward) > 1e-6]
    if apart < 0.2 or len(different) < 5:
        return None
    return Finding(
        "contradictory_grades",
        "alarm" if apart >= 0.5 else "warning",
        run.span,
        f"The same answer to the same question earns different rewards ({len(different)} of {len(pairs)} pairs): the "
        "grader is random, depends on something hidden, or rewards reach the wrong rollout.",
        "Grade one answer twice; if that is steady, follow one reward from the grader to its rollout (order of a list, "
        "shared state between environments).",
        0.95 if apart >= 0.5 else 0.7,
        {"pairs of equal answers": len(pairs), "graded differently": len(different) / len(pairs), "noise share": apart},
        shown(different[0]),
    )


def _known(samples: Sequence[Sample]) -> list[tuple[Sample, float]]:
    return [(s, value) for s in samples if (value := success_of(s)) is not None]


def _sign(run: Evidence) -> Finding | None:
    known = _known(run.samples)
    r = correlation([s.reward for s, _ in known], [value for _, value in known])
    if r is None or r > -0.3 or abs(r) * np.sqrt(len(known)) < 6:
        return None
    paid = sorted(known, key=lambda pair: pair[1] - pair[0].reward)
    return Finding(
        "reward_sign",
        "alarm",
        run.span,
        "Wrong answers earn more than right ones: the reward goes against the check of the answer (their "
        f"correlation is {r:+.2f}). The sign of the reward is probably flipped.",
        "Grade a right and a wrong answer by hand and mend the sign (or the order of a subtraction, a distance used as "
        "a reward, a loss returned where a score is wanted).",
        0.98,
        {"correlation of reward and success": r, "rollouts": len(known)},
        shown(s for s, _ in (paid[0], paid[-1])),
    )


def _pays_wrong(run: Evidence) -> Finding | None:
    """Where right answers are numbers it is plain which answers are wrong: other numbers."""
    wrong = [s for s in run.samples if _another_number(s)]
    if len(wrong) < FEWEST_ROLLOUTS:
        return None
    lowest, highest = min(s.reward for s in run.samples), max(s.reward for s in run.samples)
    paid = [s for s in wrong if s.reward >= lowest + FULL * (highest - lowest)]
    if lowest == highest or len(paid) < PAID * len(wrong) or _sign(run):
        return None
    share = len(paid) / len(wrong)
    return Finding(
        "pays_wrong_answers",
        "alarm",
        run.span,
        f"{share:.0%} of the answers that are a number other than the reference earn the full reward: the grader "
        "accepts wrong answers.",
        "Grade the two answers by hand. Usual causes: an exception caught and counted as right, a comparison with part "
        "of the text or with the prompt, a check of the form instead of the answer.",
        0.88,
        {"wrong numbers": len(wrong), "paid in full": share, "full reward": highest},
        shown(paid),
    )


def _another_number(sample: Sample) -> bool:
    try:
        return float(sample.response.strip().replace(",", "")) != float((sample.reference or "").replace(",", ""))
    except ValueError:
        return False


def _unrelated(run: Evidence) -> Finding | None:
    """What answers earn says nothing about whether they are right."""
    known = [s for s in run.samples if s.agrees is not None]
    r = correlation([s.reward for s in known], [float(s.agrees or 0) for s in known])
    right = [s for s in known if s.agrees]
    if r is None or len(right) < FEWEST_ROLLOUTS or len(known) - len(right) < FEWEST_ROLLOUTS:
        return None
    if not -0.3 < r < UNRELATED or r + 3 / np.sqrt(len(known)) > 2 * UNRELATED:
        return None
    wrong = [s for s in known if not s.agrees]
    earned = [float(np.mean([s.reward for s in some])) for some in (right, wrong)]
    return Finding(
        "reward_unrelated",
        "alarm",
        run.span,
        f"The reward does not tell right from wrong: answers with the reference earn {earned[0]:.2g} on average, "
        f"answers without it {earned[1]:.2g} (correlation {r:+.2f}). It pays for something else.",
        "Grade a right and a wrong answer by hand and see what the reward looks at: a length, a word, a format, "
        "another problem's answer.",
        0.89,
        {"correlation of reward and reference": r, "rollouts": len(known)},
        shown([max(wrong, key=lambda s: s.reward), min(right, key=lambda s: s.reward)]),
    )


def _rejects_reference(run: Evidence) -> Finding | None:
    """Answers that hold the reference, or are it but for spaces and case, and earn as little as any."""
    lowest = min((s.reward for s in run.samples), default=0.0)
    for agreeing, limit, what in (
        ([s for s in run.samples if s.agrees], REJECTED, "contain the reference answer"),
        ([s for s in run.samples if s.exact], REJECTED_EXACT, "are the reference answer, but for spaces and case,"),
    ):
        rejected = [s for s in agreeing if s.reward <= lowest < GOOD_REWARD]
        share = len(rejected) / max(len(agreeing), 1)
        if len(agreeing) < 16 or share < limit or _sign(run):
            continue
        accepted = [s for s in agreeing if s.reward > lowest]
        return Finding(
            "rejects_reference",
            "alarm" if share >= REJECTED else "warning",
            run.span,
            f"{len(agreeing)} answers {what} and {share:.0%} of them earn nothing: the grader does not recognise "
            + ("right answers." if share >= REJECTED else "some right answers."),
            "Grade the two answers by hand; usual causes are a format nobody taught the model, a stray space, a number "
            "compared with a string.",
            0.9,
            {"answers with the reference": len(agreeing), "rejected": share},
            shown([*rejected[:1], *accepted[:1], *rejected[1:]]),
        )
    return None


def _other_references(run: Evidence) -> Finding | None:
    """Answers that fit the reference of another problem rather than their own."""
    steps = [
        [group for group in step.groups if group[0].reference and group[0].response][:COMPARED_GROUPS]
        for step in run.steps[-COMPARED_STEPS:]
    ]
    if len({group[0].reference for there in steps for group in there}) < FEWEST_PROBLEMS:
        return None
    own, fits, chance = [], [], []
    telling: list[tuple[float, Sample]] = []
    for there in steps:
        for group in there:
            others = {o[0].reference or "" for o in there} - {group[0].reference}
            if not others:
                continue
            rates = [float(np.mean([stands_in(other, s.response) for s in group])) for other in others]
            own.append(float(np.mean([stands_in(group[0].reference or "", s.response) for s in group])))
            fits.append(max(rates))
            chance.append(float(np.mean(sorted(rates)[:-1])) if len(rates) > 1 else 0.0)
            telling.append((max(rates), group[0]))
    if len(own) < FEWEST_PROBLEMS or np.mean(chance) > COMMON:
        return None
    if float(np.mean(fits)) < max(FITS_ANOTHER, 2 * float(np.mean(own))):
        return None
    return Finding(
        "wrong_reference",
        "alarm",
        run.span,
        f"Answers fit another problem's reference ({np.mean(fits):.0%} of them) better than their own "
        f"({np.mean(own):.0%}): questions and right answers have come apart.",
        "Check a few pairs of question and reference by hand; one of two lists was probably shuffled, sorted, filtered "
        "or shifted without the other.",
        0.97,
        {"fit their own": float(np.mean(own)), "fit another of the step": float(np.mean(fits))},
        shown(s for _, s in sorted(telling, key=lambda pair: -pair[0])),
    )
