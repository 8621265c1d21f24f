"""Rewards from small parts: terms with weights and ranges, penalties, functions of several signatures.

A reward function takes (response), (prompt, answer) or (prompt, answer, trace), returns a number or an awaitable of
one, and knows nothing of weights; a `Term` gives it a name, a weight and the range it promises; a `Reward` adds up
terms. Judges, and rewards that compare members of a group, are in `mint.rl.judges`; reading and grading answers in
`mint.rl.answers`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mint.errors import BadRequest
from mint.rl.types import Metrics

Trace = Mapping[str, Any]
"""What an agent did on the way: `messages`, `tool_calls`, and `sample`, the row of data the prompt was made from."""
RewardFn = Callable[..., float | Awaitable[float]]

# --------------------------------------------------------------------------------------------------------------------
# Composition


class RewardError(BadRequest):
    """A grader returned what it had promised not to."""


@dataclass(frozen=True)
class Term:
    """One part of a reward, logged by its own name before it is weighted."""

    name: str
    function: RewardFn
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0
    """The range the function promises; a term that cannot rise above 0 is a penalty and is counted as one."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise BadRequest(f"the term {self.name!r} has the range [{self.low}, {self.high}]; low must be below high.")
        count_arguments(self.function)


@dataclass(frozen=True)
class Reward:
    """The weighted sum of its terms, and every term as a metric."""

    terms: tuple[Term, ...]
    out_of_range: Literal["refuse", "clip"] = "refuse"
    """What to do with a value outside its term's range, NaN included: stop and show the sample, or clip (NaN to the low
    end) and count it under `reward_clipped`."""

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names or len(set(names)) != len(names):
            raise BadRequest(f"a Reward needs at least one term, each with a name of its own; got {names}.")
        if self.out_of_range not in ("refuse", "clip"):
            raise BadRequest(f"out_of_range is {self.out_of_range!r}; it must be 'refuse' or 'clip'.")

    @property
    def range(self) -> tuple[float, float]:
        ends = [sorted((term.weight * term.low, term.weight * term.high)) for term in self.terms]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    async def __call__(self, prompt: str, answer: str, trace: Trace | None = None) -> tuple[float, Metrics]:
        total, clipped, penalties = 0.0, 0, 0.0
        metrics: Metrics = {}
        for term in self.terms:
            value = await call_reward(term.function, prompt, answer, trace or {})
            if not term.low <= value <= term.high:
                value, clipped = self._bounded(term, value, prompt, answer), clipped + 1
            metrics[f"reward/{term.name}"] = value
            total += term.weight * value
            if term.high <= 0:
                penalties += term.weight * value
                metrics[f"penalized/{term.name}"] = float(value < 0)
        if any(term.high <= 0 for term in self.terms):
            metrics["reward/penalties"] = penalties
        if self.out_of_range == "clip":
            metrics["reward_clipped"] = clipped
        return total, metrics

    def _bounded(self, term: Term, value: float, prompt: str, answer: str) -> float:
        if self.out_of_range == "clip":
            return term.low if math.isnan(value) else min(max(value, term.low), term.high)
        raise RewardError(
            f"the reward term {term.name!r} returned {value}, outside its range [{term.low}, {term.high}], for the "
            f"prompt {_excerpt(prompt)} and the answer {_excerpt(answer)}. Mend the grader, widen its range, or clip."
        )


def _excerpt(text: str, limit: int = 200) -> str:
    return repr(text if len(text) <= limit else f"{text[:limit]}...")


def as_reward(reward: Reward | RewardFn) -> Reward:
    """A plain function is a reward of one term in [0, 1]."""
    return reward if isinstance(reward, Reward) else Reward((Term("score", reward),))


def count_arguments(function: RewardFn) -> int:
    """1, 2 or 3: which of the accepted signatures this is."""
    parameters = list(inspect.signature(function).parameters.values())
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_trace = any(p.name == "trace" or p.kind is p.VAR_POSITIONAL for p in parameters)
    count = 3 if takes_trace and len(required) in (0, 2) else len(required)
    if count not in (1, 2, 3) or any(p.kind is p.KEYWORD_ONLY for p in required):
        raise BadRequest(
            f"the reward function {getattr(function, '__name__', function)!r} takes "
            f"({', '.join(p.name for p in parameters)}); it must take (response), (prompt, answer) or "
            "(prompt, answer, trace)."
        )
    return count


async def call_reward(function: RewardFn, prompt: str, answer: str, trace: Trace) -> float:
    """Calls a reward function with as much as it takes."""
    arguments = {1: (answer,), 2: (prompt, answer), 3: (prompt, answer, trace)}[count_arguments(function)]
    value = function(*arguments)
    return float(await value if inspect.isawaitable(value) else value)


# --------------------------------------------------------------------------------------------------------------------
# Penalties, all in [-1, 0]


def verbosity_penalty(free: int, limit: int, weight: float = 1.0) -> Term:
    """0 up to `free` characters, falling evenly to -1 at `limit`."""
    return Term("verbosity", lambda response: _ramp(len(response), free, limit), weight, -1.0, 0.0)


def tool_spam_penalty(free: int, limit: int, weight: float = 1.0) -> Term:
    """The same over the number of tool calls in the trace."""

    def penalty(prompt: str, answer: str, trace: Trace) -> float:
        return _ramp(len(trace.get("tool_calls", ())), free, limit)

    return Term("tool_spam", penalty, weight, -1.0, 0.0)


def unsafe_words_penalty(words: Sequence[str], weight: float = 1.0) -> Term:
    """-1 if any of the words is in the response, as a whole word in any case."""
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(map(re.escape, words)) + r")(?!\w)", re.IGNORECASE)
    return Term("unsafe", lambda response: -1.0 if words and pattern.search(response) else 0.0, weight, -1.0, 0.0)


def _ramp(amount: int, free: int, limit: int) -> float:
    if amount <= free:
        return 0.0
    return -min((amount - free) / max(limit - free, 1), 1.0)
