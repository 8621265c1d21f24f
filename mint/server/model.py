"""One training model: its run's row, its journal, its runner and its place in the order.

What all of them share is in `models`; how a request comes to its turn in `intake`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from mint.backend import ModelFacts
from mint.errors import Busy
from mint.server.futures import Answer, json_answer
from mint.server.journal import Head, Journal, Place
from mint.server.limits import Limits
from mint.server.quotas import Line
from mint.server.runner import Runner, StateMark
from mint.server.sequencer import Sequencer
from mint.server.store import RunRow
from mint.types import LoraConfig


@dataclass(eq=False)
class Model:
    run: RunRow
    created: Head
    """How it was made: all that is needed to make it again."""
    journal: Journal
    runner: Runner
    sequencer: Sequencer
    facts: ModelFacts | None = None
    line: Line = field(default_factory=Line)
    last_request: float = field(default_factory=time.time)
    state_due: float | None = None
    """When its state should next be written; None while nothing has happened since the last one."""

    @property
    def id(self) -> str:
        return self.run.id

    def consider_state(self, op: str, limits: Limits) -> None:
        """Begins a new segment when it is time: at best right after a step, when there are no gradients to be saved."""
        now, runner = time.monotonic(), self.runner
        if self.state_due is None:
            self.state_due = now + max(limits.state_seconds, 20 * runner.state_seconds)
        late = now - self.state_due
        full = self.journal.bytes_in_segment / limits.state_bytes
        if not (op == "optim_step" and (late > 0 or full > 1)) and not (late > limits.state_seconds or full > 2):
            return
        if runner.state_pending or self.sequencer.waiting or not self.journal.idle:
            return
        sequencer = self.sequencer
        header = {
            "kind": "segment",
            "created": self.created,
            "next": sequencer.following,
            "handled": sequencer.handled.runs,
        }

        def written(outcome: Place | Busy) -> None:
            if isinstance(outcome, Busy):
                runner.state_pending = False
            else:
                runner.take(StateMark(outcome.segment))

        runner.state_pending, self.state_due = True, None
        self.journal.begin_segment(header, written)


def run_id(session_id: str, number: int) -> str:
    """Clients that create a model by loading compute this id themselves."""
    return f"{session_id}:train:{number}"


def row_of(created: Head) -> RunRow:
    lora = LoraConfig(**created["lora"])
    return RunRow(
        id=created["model"],
        session_id=created["session"],
        owner=created["owner"],
        base_model=created["base_model"],
        rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
        user_metadata=created["user_metadata"],
    )


def created_answer(model: Model) -> Answer:
    if (source := model.created["source"]) is None:
        return json_answer({"model_id": model.id, "type": "create_model"})
    return json_answer({"model_id": model.id, "path": source["path"], "type": "load_weights"})
