"""What a run has used so far, and whether that is all it may: read off its metrics, so it counts over every resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mint.rl.config import Config

TOKENS = (
    "train/tokens",
    *(f"{part}env/all/{kind}" for part in ("", "test/") for kind in ("total_ac_tokens", "total_ob_tokens")),
)
"""Trained, sampled and read, in training and evaluation."""


@dataclass
class Spent:
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def in_all(cls, lines: Iterable[Mapping[str, float]]) -> Spent:
        spent = cls()
        for line in lines:
            spent.add(line)
        return spent

    def add(self, metrics: Mapping[str, float]) -> None:
        self.tokens += round(sum(metrics.get(name, 0.0) for name in TOKENS))
        self.seconds += metrics.get("time/total", 0.0)

    def reached(self, config: Config) -> str | None:
        """What was used up, in words."""
        if config.budget_tokens is not None and self.tokens >= config.budget_tokens:
            return f"{self.tokens:,} tokens, and budget_tokens is {config.budget_tokens:,}"
        if config.budget_seconds is not None and self.seconds >= config.budget_seconds:
            return f"{self.seconds:,.0f} s, and budget_seconds is {config.budget_seconds:,}"
        return None
