"""Rollouts for a reader: best, worst and random of a few steps, every token coloured by its advantage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from mint.rl.hashing import stable_hash
from mint.rl.rollout_log import best_worst_random
from mint.rl.rundir import RolloutRecord, RunDir

SHOWN_STEPS = 3
SHOWN_A_STEP = 3
MOST_TOKENS = 1500
"""Of one rollout; a report is read by people."""


def chosen_steps(run: RunDir, wanted: Sequence[int] | None) -> list[int]:
    """Those asked for and there; without a wish the first, the middle and the last."""
    steps = run.rollout_steps()
    if wanted:
        return [step for step in steps if step in set(wanted)]
    if len(steps) <= SHOWN_STEPS:
        return steps
    return [steps[0], steps[len(steps) // 2], steps[-1]]


def samples(run: RunDir, wanted: Sequence[int] | None = None) -> str:
    return "".join(_step(step, run.rollouts(step)) for step in chosen_steps(run, wanted))


def _step(step: int, records: Sequence[RolloutRecord]) -> str:
    if not records:
        return ""
    rewards = [record.reward for record in records]
    chosen = best_worst_random(rewards, SHOWN_A_STEP, stable_hash("report", step))
    shown = sorted(chosen, key=lambda index: -rewards[index])
    roles = dict.fromkeys(shown, "random") | {shown[-1]: "worst", shown[0]: "best"}
    largest = max((abs(value) for index in shown for value in token_advantages(records[index])), default=0.0) or 1.0
    cards = "".join(_card(records[index], roles[index], largest) for index in shown)
    mean = sum(rewards) / len(rewards)
    return f"<h3>Step {step} <small>{len(records)} rollouts, mean reward {mean:.3f}</small></h3>{cards}"


def token_advantages(record: RolloutRecord) -> list[float]:
    """As sent to the trainer; where nothing was sent, the answer's own on every token."""
    return record.advantages or [record.advantage or 0.0] * len(record.completion_pieces)


def _card(record: RolloutRecord, role: str, largest: float) -> str:
    advantage = "" if record.advantage is None else f", advantage {record.advantage:+.3f}"
    terms = "".join(f", {escape(name)} {value:.3g}" for name, value in record.reward_terms.items())
    head = (
        f'<b class="{role}">{role}</b> reward {record.reward:.3g}{advantage} '
        f"<small>group {record.group}, member {record.member}; {sum(record.mask)} tokens, "
        f"{escape(record.stop_reason or 'no stop reason')}{terms}</small>"
    )
    return (
        f'<article class="sample"><header>{head}</header><pre><span class="prompt">{escape(record.prompt_text)}</span>'
        f'<span class="answer">{_tokens(record, largest)}</span></pre></article>'
    )


def _tokens(record: RolloutRecord, largest: float) -> str:
    spans = []
    for n, (piece, value) in enumerate(zip(record.completion_pieces, token_advantages(record), strict=True)):
        if n == MOST_TOKENS:
            spans.append(f"<i> … {len(record.completion_pieces) - n} more tokens</i>")
            break
        text = escape(piece).replace("\n", "⏎\n")
        if not record.mask[n]:
            spans.append(f"<i>{text}</i>")
            continue
        side, depth = ("up" if value > 0 else "down"), abs(value) / largest
        title = escape(_figures(record, n, value))
        spans.append(f'<span class="{side}" style="--d:{depth:.2f}" title="{title}">{text}</span>')
    return "".join(spans)


def _figures(record: RolloutRecord, n: int, advantage: float) -> str:
    told = f"token {n}, advantage {advantage:+.4f}, log-prob {record.logprobs[n]:.4f}"
    if record.train_logprobs is None:
        return told
    trained = record.train_logprobs[n]
    return f"{told}, trainer's {trained:.4f}, ratio {math.exp(trained - record.logprobs[n]):.4f}"
