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

FOLLOWS_FROM: dict[str, frozenset[str]] = {
    "all_right": frozenset({"grader_errors", "same_prompt"}),
    "all_wrong": frozenset(
        {
            "wrong_tokenizer",
            "stop_token_missing",
            "stops_at_once",
            "truncated",
            "grader_errors",
            "rejects_reference",
            "same_prompt",
            "learning_rate_large",
            "reward_sign",
        }
    ),
    "identical_samples": frozenset({"stops_at_once", "temperature_changed"}),
    "truncated": frozenset(
        {
            "stop_token_missing",
            "wrong_tokenizer",
            "learning_rate_large",
            "temperature_changed",
            "length_drift",
            "repetition",
        }
    ),
    "same_answer": frozenset({"stops_at_once", "same_prompt", "learning_rate_large", "reward_hacking", "reward_sign"}),
    "collapse": frozenset({"reward_hacking", "learning_rate_large", "temperature_changed", "same_answer"}),
    "repetition": frozenset(
        {"stop_token_missing", "learning_rate_large", "reward_hacking", "wrong_tokenizer", "length_drift"}
    ),
    "length_drift": frozenset({"reward_hacking", "learning_rate_large", "temperature_changed", "reward_sign"}),
    "reward_hacking": frozenset({"reward_sign", "leaked_holdout"}),
    "reward_fell": frozenset(
        {
            "learning_rate_large",
            "stale_sampler",
            "wrong_advantage",
            "mismatch",
            "temperature_changed",
            "staleness",
            "reward_sign",
        }
    ),
    "spike": frozenset(
        {"learning_rate_large", "temperature_changed", "stale_sampler", "shifted_logprobs", "mismatch", "staleness"}
    ),
    "leaked_holdout": frozenset({"same_prompt"}),
    "temperature_changed": frozenset({"learning_rate_large", "stop_token_missing", "repetition", "same_answer"}),
    "mismatch": frozenset({"stale_sampler", "shifted_logprobs"}),
    "staleness": frozenset({"stale_sampler"}),
    "frozen": frozenset({"stale_sampler", "all_wrong", "all_right", "identical_samples", "group_of_one"}),
    "learning_rate_small": frozenset({"frozen", "stale_sampler", "kl_outweighs_reward"}),
    "no_progress": frozenset(
        {
            "frozen",
            "learning_rate_small",
            "contradictory_grades",
            "wrong_advantage",
            "stale_sampler",
            "mismatch",
            "reward_sign",
        }
    ),
    "saturation": frozenset({"all_right"}),
    "few_groups_with_signal": frozenset({"all_right", "all_wrong", "grader_errors", "truncated", "stop_token_missing"}),
}
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
