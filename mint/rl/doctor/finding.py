"""What the doctor says: one finding, how grave it is, and which findings merely follow from others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from mint.rl.doctor.evidence import Sample

Severity = Literal["notice", "warning", "alarm"]
SEVERITIES: tuple[Severity, ...] = ("notice", "warning", "alarm")
"""Notice: good to know. Warning: probably costs you something. Alarm: what this run learns is not what you want."""

SHOWN_SAMPLES = 2

_PROMPT = frozenset({"wrong_tokenizer", "wrong_template", "ambiguous_prompts"})
_ENDING = frozenset({"stop_token_missing", "stops_at_once", "stops_early"})
_CHANGED = frozenset({"temperature_changed", "sampling_changed", "learning_rate_changed", "weights_replaced"})
_LOOP = frozenset(
    {"wrong_advantage", "one_sided_advantages", "dropped_rollouts", "foreign_datums", "missing_updates", "mask"}
)
_GRADER = frozenset({"reward_sign", "pays_wrong_answers", "reward_unrelated", "rejects_reference", "wrong_reference"})
_SAMPLER = frozenset({"stale_sampler", "mismatch", "shifted_logprobs", "staleness"})

FOLLOWS_FROM: dict[str, frozenset[str]] = {
    "all_right": frozenset({"grader_errors", "same_prompt", "pays_wrong_answers", "reward_unrelated"}),
    "all_wrong": _PROMPT | _ENDING | _CHANGED | {
        "truncated", "grader_errors", "rejects_reference", "same_prompt", "learning_rate_large", "reward_sign",
        "wrong_reference", "one_sided_advantages",
    },
    "stops_at_once": _PROMPT,
    "identical_samples": _ENDING | {"temperature_changed", "sampling_changed"},
    "truncated": _PROMPT | _CHANGED | {
        "stop_token_missing", "learning_rate_large", "length_drift", "repetition", "one_sided_advantages",
    },
    "same_answer": _PROMPT | _ENDING | (_CHANGED - {"temperature_changed"}) | {
        "same_prompt", "learning_rate_large", "reward_hacking", "reward_sign", "one_sided_advantages",
    },
    "collapse": _CHANGED | _LOOP | _GRADER | {"reward_hacking", "learning_rate_large", "same_answer"},
    "repetition": _PROMPT | _GRADER | (_CHANGED - {"temperature_changed"}) | {
        "stop_token_missing", "learning_rate_large", "reward_hacking", "length_drift",
    },
    "length_drift": _CHANGED | _GRADER | {"reward_hacking", "learning_rate_large", "data_order"},
    "reward_hacking": _CHANGED | {"reward_sign", "rejects_reference", "leaked_holdout", "data_order"},
    "ambiguous_prompts": frozenset({"wrong_reference"}),
    "reward_sign": frozenset({"wrong_reference"}),
    "rejects_reference": frozenset({"wrong_reference"}),
    "reward_unrelated": frozenset({"wrong_reference", "contradictory_grades", "grader_errors"}),
    "pays_wrong_answers": frozenset({"wrong_reference", "contradictory_grades", "grader_errors"}),
    "reward_fell": _CHANGED | _LOOP | _SAMPLER | {"learning_rate_large", "reward_sign", "data_order"},
    "spike": _CHANGED | _SAMPLER | {"learning_rate_large", "reward_scale"},
    "learning_rate_large": frozenset({"learning_rate_changed"}),
    "leaked_holdout": frozenset({"same_prompt", "ambiguous_prompts"}),
    "data_order": frozenset({"same_prompt", "duplicate_prompts", "ambiguous_prompts"}),
    "temperature_changed": frozenset(
        {
            "learning_rate_large", "learning_rate_changed", "weights_replaced", "stop_token_missing", "repetition",
            "same_answer", "data_order",
        }
    ),
    "mismatch": frozenset({"stale_sampler", "shifted_logprobs"}),
    "staleness": frozenset({"stale_sampler"}),
    "one_sided_advantages": frozenset({"dropped_rollouts"}),
    "wrong_advantage": frozenset({"kl_outweighs_reward"}),
    "kl_outweighs_reward": frozenset({"reward_scale"}),
    "frozen": frozenset({"stale_sampler", "all_wrong", "all_right", "identical_samples", "group_of_one"}),
    "learning_rate_small": frozenset({"frozen", "stale_sampler", "kl_outweighs_reward", "learning_rate_changed"}),
    "no_progress": _LOOP | _SAMPLER | {
        "frozen", "learning_rate_small", "contradictory_grades", "reward_sign", "learning_rate_changed",
    },
    "saturation": frozenset({"all_right", "pays_wrong_answers", "reward_unrelated"}),
    "few_groups_with_signal": _PROMPT | _ENDING | {
        "all_right", "all_wrong", "grader_errors", "truncated", "wrong_reference", "sampling_changed",
    },
    "never_positive": frozenset({"reward_sign"}),
}  # fmt: skip
"""Effect -> its causes: where one of these was found too, the effect stands behind it."""
EXPLAINED = 0.3
"""What is left of a finding's likelihood as a cause once another finding explains it."""


@dataclass(frozen=True)
class Finding:
    kind: str
    severity: Severity
    steps: tuple[int, int]
    """First and last step it was seen in."""
    sentence: str
    """What is wrong, for a person who knows nothing of this code."""
    remedy: str
    likelihood: float
    """How likely this is a cause of trouble, not chance and not the effect of something else; orders a report."""
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    samples: tuple[dict[str, Any], ...] = ()
    """Two rollouts in which it shows."""
    follows_from: str | None = None
    """A finding that explains this one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """As a person reads it."""
        first, last = self.steps
        where = f"step {first}" if first == last else f"steps {first} to {last}"
        lines = [f"{self.severity.upper()} {self.kind}, {where}: {self.sentence}"]
        if self.follows_from:
            lines.append(f"  follows from: {self.follows_from}")
        figures = ", ".join(f"{name} {_figure(value)}" for name, value in self.evidence.items())
        lines += [f"  figures: {figures}"] if figures else []
        for sample in self.samples:
            answer = f", the reference is {sample['reference']!r}" if sample.get("reference") is not None else ""
            lines.append(
                f"  step {sample['step']}, group {sample['group']}, member {sample['member']}: {sample['prompt']!r} -> "
                f"{sample['completion']!r}, reward {sample['reward']:.3g}{answer}"
            )
        return [*lines, f"  remedy: {self.remedy}"]


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def shown(samples: Iterable[Sample]) -> tuple[dict[str, Any], ...]:
    """The first two as evidence; a check puts the telling ones first."""
    chosen = list(samples)[:SHOWN_SAMPLES]
    names = ("step", "group", "member", "prompt", "completion", "reference", "reward", "advantage")
    return tuple({name: getattr(sample, name) for name in names} for sample in chosen)


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """By likelihood, effects behind their causes; graver first among equals."""
    kinds = {finding.kind: finding for finding in findings}
    result = []
    for finding in findings:
        causes = [k for k in FOLLOWS_FROM.get(finding.kind, ()) if k in kinds and kinds[k].severity != "notice"]
        if causes:
            cause = max(causes, key=lambda kind: (kinds[kind].likelihood, kind))
            finding = replace(finding, likelihood=finding.likelihood * EXPLAINED, follows_from=cause)
        result.append(finding)
    return sorted(result, key=lambda f: (-f.likelihood, -SEVERITIES.index(f.severity), f.kind))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """One of a kind: the gravest, over all the steps any of them covers."""
    by_kind: dict[str, Finding] = {}
    for finding in findings:
        other = by_kind.setdefault(finding.kind, finding)
        worse = max(other, finding, key=lambda f: (SEVERITIES.index(f.severity), f.likelihood))
        steps = min(other.steps[0], finding.steps[0]), max(other.steps[1], finding.steps[1])
        by_kind[finding.kind] = replace(worse, steps=steps)
    return list(by_kind.values())
