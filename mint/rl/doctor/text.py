"""Prompts that are not what the model was made for: another tokenizer, another chat template."""

from __future__ import annotations

from mint.rl.doctor.evidence import Evidence
from mint.rl.doctor.finding import Finding, shown

FEWEST = 16
SHARE = 0.5


def check(run: Evidence) -> list[Finding]:
    return _tokenizer(run) or _template(run)


def _template(run: Evidence) -> list[Finding]:
    odd = [s for s in run.samples if s.oddity]
    if len(run.samples) < FEWEST or len(odd) < SHARE * len(run.samples):
        return []
    return [
        Finding(
            "wrong_template",
            "alarm",
            run.span,
            f"{len(odd) / len(run.samples):.0%} of the prompts do not fit the model; the first {odd[0].oddity}.",
            "Make prompts with the model's own tokenizer and its chat template "
            "(training_client.get_tokenizer().apply_chat_template), and read the prompts below as the model does.",
            0.97,
            {"odd prompts": len(odd) / len(run.samples)},
            shown(odd),
        )
    ]


def _tokenizer(run: Evidence) -> list[Finding]:
    samples = run.samples
    misread = [s for s in samples if s.misread]
    garbled = [s for s in samples if s.garbled]
    if len(samples) < FEWEST or max(len(misread), len(garbled)) < SHARE * len(samples):
        return []
    if len(misread) >= SHARE * len(samples):
        side = misread[0].misread
        sentence = (
            "What the model's tokenizer reads in the prompt is not the question the environment asked"
            if side == "prompt"
            else "The response the environment graded is not what the model's tokens spell"
        )
        sentence += ": the environment uses another tokenizer than the model."
    else:
        sentence = (
            f"{len(garbled) / len(samples):.0%} of the rollouts contain characters no text has (replacement marks, "
            "control codes): prompts were probably made with another tokenizer than the model's."
        )
    return [
        Finding(
            "wrong_tokenizer",
            "alarm",
            run.span,
            sentence,
            "Take the tokenizer from the client (training_client.get_tokenizer()) for the environment too, and compare "
            "the prompts below with what you meant to ask.",
            0.98 if misread else 0.8,
            {"differing texts": len(misread) / len(samples), "garbled": len(garbled) / len(samples)},
            shown([*misread, *garbled]),
        )
    ]
