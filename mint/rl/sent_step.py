"""What a recorded loop sent since its last `end_step`, and what that says in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mint.rl.scored import Scored
from mint.rl.watched import OptimCall, TrainCall

SENT_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sampling parameters whose means are logged every step as `sampling/<name>`."""


@dataclass
class SentStep:
    """What happened since the last `end_step`."""

    scored: list[Scored] = field(default_factory=list)
    trained: list[TrainCall] = field(default_factory=list)
    repeated: int = 0
    """Datums sent again before an optimizer step."""
    since_update: set[int] = field(default_factory=set)
    updates: list[OptimCall] = field(default_factory=list)

    def note(self, call: TrainCall | OptimCall) -> None:
        if isinstance(call, TrainCall):
            seen = {id(datum) for datum in call.data_D}
            self.repeated += len(seen & self.since_update)
            self.since_update |= seen
            self.trained.append(call)
        else:
            self.updates.append(call)
            self.since_update.clear()

    def settings(self) -> dict[str, Any]:
        """What the step shows of how the loop is set up."""
        seen: dict[str, Any] = {}
        for call in self.trained[:1]:
            seen["loss_fn"] = call.loss_fn
        for update in self.updates[:1]:
            seen["learning_rate"] = update.params.learning_rate
        for scored in self.scored[:1]:
            params = scored.turns[0].call.params
            seen |= {"temperature": params.temperature, "max_tokens": params.max_tokens}
        return seen

    def sampling_metrics(self) -> dict[str, float]:
        params = [turn.call.params for one in self.scored for turn in one.turns]
        metrics = {}
        for name in SENT_SAMPLING:
            values = [float(value) for p in params if (value := getattr(p, name)) is not None]
            if values:
                metrics[f"sampling/{name}"] = float(np.mean(values))
        return metrics

    def update_metrics(self) -> dict[str, float]:
        """What the optimizer said of its last step, and how much was sent."""
        metrics = {
            "train/datums": float(sum(len(call.data_D) for call in self.trained)),
            "train/datums_repeated": float(self.repeated),
            "train/unsampled_tokens": float(sum(one.strays for one in self.scored)),
            "train/optim_steps": float(len(self.updates)),
            "train/skipped": 0.0 if self.updates else 1.0,
        }
        if self.updates:
            metrics |= self.updates[-1].future.result().metrics or {}
            metrics["optim/lr"] = self.updates[-1].params.learning_rate
        return metrics
