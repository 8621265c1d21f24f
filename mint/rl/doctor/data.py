"""The problems: whether the holdout is trained on, and whether they are different problems at all."""

from __future__ import annotations

from collections import defaultdict

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown
from mint.rl.doctor.statistics import SURE, change_of, holdout_change

LEAK_ALARM = 0.1
"""Of the training prompts or of the holdout: from here up a tenth of the measured progress may be memory."""
FEWEST_GROUPS = 12
FEW_DIFFERENT = 0.6
AMBIGUOUS = 0.2
"""Of the groups: a task may well have a question or two with more than one answer."""
ORDERED = 0.1
"""Of the length at the start."""


def check(run: Evidence) -> list[Finding]:
    found = (_leaked(run), _same_prompt(run) or _ambiguous(run) or _duplicates(run), _order(run))
    return [finding for finding in found if finding]


def _leaked(run: Evidence) -> Finding | None:
    """By prompt or by name: the same problem may be asked in two forms."""
    held_out = {s.problem: s.prompt_key for e in run.evaluations for s in e.samples}
    trained = {s.problem: s.prompt_key for s in run.samples}
    prompts = set(trained.values())
    both = {problem for problem, prompt in held_out.items() if problem in trained or prompt in prompts}
    if not both:
        return None
    share = max(len(both) / len(held_out), len(both) / len(trained))
    return Finding(
        "leaked_holdout",
        "alarm" if share >= LEAK_ALARM else "warning",
        run.span,
        f"{len(both)} of the {len(held_out)} held-out problems were trained on in these steps: the holdout measures "
        "memory there, not skill.",
        "Split by problem before anything else (mint.rl.datasets.holdout_split; equal prompts must fall on one "
        "side), or leave the test set to the loop (holdout=0.1).",
        0.98,
        {
            "held-out problems trained on": len(both) / len(held_out),
            "of the training problems": len(both) / len(trained),
        },
        shown(s for s in run.samples if s.problem in both or s.prompt_key in {held_out[problem] for problem in both}),
    )


def _same_prompt(run: Evidence) -> Finding | None:
    groups = [group for step in run.steps for group in step.groups]
    prompts = {group[0].prompt_key for group in groups}
    if len(groups) < FEWEST_GROUPS or len(prompts) > 1:
        return None
    named = len({group[0].problem for group in groups})
    answers = {s.reference for group in groups for s in group if s.reference is not None}
    wrong = named > 1 or len(answers) > 1
    return Finding(
        "same_prompt",
        "alarm" if wrong else "warning",
        run.span,
        f"All {len(groups)} groups have the same prompt" + (" although the problems differ." if wrong else "."),
        "A function made in a loop sees the loop's last value: bind the problem when it is made (functools.partial, or "
        "a default argument).",
        0.97 if wrong else 0.6,
        {"groups": len(groups), "different prompts": 1, "problems": named},
        shown(group[0] for group in groups),
    )


def _ambiguous(run: Evidence) -> Finding | None:
    """Prompts that are asked with different right answers."""
    groups = [group[0] for step in run.steps for group in step.groups if group[0].reference is not None]
    answers: dict[int, set[str]] = defaultdict(set)
    for sample in groups:
        answers[sample.prompt_key].add(str(sample.reference))
    several = [s for s in groups if len(answers[s.prompt_key]) > 1]
    if len(several) < max(FEWEST_GROUPS, AMBIGUOUS * len(groups)):
        return None
    most = max(len(found) for found in answers.values())
    return Finding(
        "ambiguous_prompts",
        "alarm",
        run.span,
        f"{len(several)} of {len(groups)} groups have a prompt that was also asked with another right answer (one of "
        f"them with {most}): what tells the problems apart does not reach the model.",
        "Look at the prompts as they were sent (mint show RUN --step 0 --group 0): cut to a length limit, a template "
        "whose field stays empty, or a question that is not filled in.",
        0.99,
        {"groups with such a prompt": len(several) / len(groups), "right answers of one prompt": most},
        shown(sorted(several, key=lambda s: s.prompt_key)),
    )


def _duplicates(run: Evidence) -> Finding | None:
    """Prompts that come several times within a step."""
    steps = [step for step in run.steps if len(step.groups) > 2]
    groups = sum(len(step.groups) for step in steps)
    different = sum(len({group[0].prompt_key for group in step.groups}) for step in steps)
    if groups < FEWEST_GROUPS or different > FEW_DIFFERENT * groups:
        return None
    return Finding(
        "duplicate_prompts",
        "warning",
        run.span,
        f"Of the {groups} groups only {different} have a prompt of their own in their step: a batch asks the same "
        "few questions over and over.",
        "Look at how batches are drawn (with replacement? a list multiplied? a loader per worker with the same seed?); "
        "larger groups are the way to ask one question more often.",
        0.9,
        {"groups": groups, "different prompts within steps": different / groups},
        shown(group[0] for group in steps[-1].groups),
    )


def _order(run: Evidence) -> Finding | None:
    """Problems that change along the run: sorted, or from another source from some step on."""
    for name, what in (("prompt_length", "prompts"), ("reference_length", "right answers")):
        change = change_of(run, name)
        if change is None or abs(change.sure) < SURE or abs(change.size) < ORDERED * change.before:
            continue
        reward, held_out = change_of(run, "reward"), holdout_change(run)
        figures: dict[str, float | str] = {f"length of {what} at first": change.before, "at last": change.after}
        if reward:
            figures |= {"reward at first": reward.before, "reward at last": reward.after}
        if held_out:
            figures |= {"holdout at first": held_out.before, "holdout at last": held_out.after}
        unit = "tokens" if name == "prompt_length" else "characters"
        return Finding(
            "data_order",
            "warning",
            run.span,
            f"The problems change along the run: {what} go from {change.before:.1f} to {change.after:.1f} {unit}. "
            "The training reward then follows the data and not the policy.",
            "Shuffle the problems (ListRLDataset does, by its seed) unless the order is meant, and judge progress by "
            "the holdout.",
            0.85,
            figures,
            shown([*run.steps[0].samples[:1], *run.steps[-1].samples[:1]]),
        )
    return None
