"""Budgets: what a run, or a key over its whole life, may use before it is stopped.

A run's budget is given when it is created, in its `user_metadata`: `budget_tokens` (read, sampled and trained ones
together) and `budget_seconds` (of engine time). A key's is one of its limits. Whoever has reached one is refused
further samples and gradients; the run at hand is saved first, and may still take the step its gradients were paid for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from mint.errors import BadRequest, BudgetReached
from mint.server.audit import Audit
from mint.server.keyring import Quota
from mint.server.store import RunRow
from mint.server.usage import Counter, Used

CHECKPOINT = "budget-stop"
SAVE_SECONDS = 20.0
"""How long a refusal waits to say that the state has been saved; clients give up on a request after 60 s."""


@dataclass(frozen=True)
class Budget:
    tokens: int | None = None
    seconds: float | None = None

    @classmethod
    def of_run(cls, user_metadata: Mapping[str, str]) -> Budget:
        tokens = _number(user_metadata, "budget_tokens")
        return cls(None if tokens is None else math.ceil(tokens), _number(user_metadata, "budget_seconds"))

    @classmethod
    def of_key(cls, quota: Quota) -> Budget:
        return cls(quota.budget_tokens, quota.budget_seconds)

    def reached_by(self, total: Callable[[], Used]) -> str | None:
        """What was used up, in words. `total` is asked for only if there is a budget."""
        if self.tokens is not None and (used := total().tokens) >= self.tokens:
            return f"{used:,} tokens, and its budget_tokens is {self.tokens:,}"
        if self.seconds is not None and (spent := total().engine_seconds) >= self.seconds:
            return f"{spent:,.1f} s of engine time, and its budget_seconds is {self.seconds:,}"
        return None


class Budgets:
    save: Callable[[str], Awaitable[str | None]]
    """Saves the state of a run and gives its path, None if the run is not in memory; set once there is a server."""

    def __init__(
        self, usage: Counter, quota: Callable[[str], Quota], label: Callable[[str], str], audit: Audit
    ) -> None:
        self._usage, self._quota, self._label, self._audit = usage, quota, label, audit
        self._saves: dict[tuple[str, Budget], asyncio.Future[str | None]] = {}

    async def check(self, owner: str, run: RunRow | None = None) -> None:
        """Lets a request of this owner, for this run if for any, go on; or `BudgetReached`."""
        if run is not None and run.owner == owner:
            budget = Budget.of_run(run.user_metadata)
            if told := budget.reached_by(lambda: self._usage.total(owner, run.id)):
                path = await self._stop(owner, run.id, budget)
                raise BudgetReached(
                    f"run {run.id} has used {told}; it was stopped. {_saved(path)} To go on with a new budget: "
                    f"create_training_client_from_state_with_optimizer({path or 'its newest checkpoint'!r}, "
                    "user_metadata={'budget_tokens': ...})."
                )
        budget = Budget.of_key(self._quota(owner))
        if told := budget.reached_by(lambda: self._usage.total(owner)):
            path = None if run is None else await self._stop(owner, run.id, budget)
            name = self._label(owner)
            option = "--budget-tokens" if "budget_tokens" in told else "--budget-seconds"
            raise BudgetReached(
                f"the key {name!r} has used {told}; nothing more is sampled or trained with it. {_saved(path)} To go "
                f"on, have the budget raised (mint keys set {name} {option} N); this client can then be used further."
            )

    async def _stop(self, owner: str, run_id: str, budget: Budget) -> str | None:
        """Saves the run, once for each budget it reaches; where it is saved."""
        key = (run_id, budget)
        if key not in self._saves:
            self._audit.write("budget_reached", owner, run_id, "stopped")
            self._saves[key] = asyncio.ensure_future(self.save(run_id))
            self._saves[key].add_done_callback(lambda done: done.cancelled() or done.exception())  # told to who asks
        done, _ = await asyncio.wait([self._saves[key]], timeout=SAVE_SECONDS)
        if done and (failure := self._saves[key].exception()) is not None:
            del self._saves[key]  # it is tried again with the next request
            raise failure
        return self._saves[key].result() if done else f"tinker://{run_id}/weights/{CHECKPOINT}"


def _saved(path: str | None) -> str:
    return "" if path is None else f"Its state is saved as {path}."


def _number(user_metadata: Mapping[str, str], name: str) -> float | None:
    if name not in user_metadata:
        return None
    try:
        number = float(user_metadata[name].strip("'\""))
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise BadRequest(f"user_metadata has {name} {user_metadata[name]!r}; a budget is a finite number above 0.")
    return number
