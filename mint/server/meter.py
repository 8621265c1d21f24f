"""Every request that costs something passes here twice: to be let in, and to be counted.

Limits are in `quotas`, sums in `usage`, the end of a run's means in `budgets`; here is which of them a request meets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mint.columns import token_count
from mint.server.audit import Audit
from mint.server.auth import Keys
from mint.server.budgets import Budget, Budgets
from mint.server.checkpoints import Checkpoints
from mint.server.engine_clock import EngineClock, Party
from mint.server.futures import Answer
from mint.server.quotas import Quotas
from mint.server.runner import Step
from mint.server.store import RunRow, Store
from mint.server.usage import Counter, Used
from mint.types import SampleRequest, SampleResponse

if TYPE_CHECKING:
    from mint.server.models import Model
    from mint.server.steps import Call

COMPUTES = ("forward", "forward_backward", "reverse_kl")
SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


class Meter:
    find_run: Callable[[str], RunRow | None]
    """The run of an id; set once there is a whole server."""

    def __init__(self, keys: Keys, store: Store, checkpoints: Checkpoints, audit: Audit) -> None:
        self._checkpoints = checkpoints
        self._clock = EngineClock()
        self.usage = Counter(store)
        self.quotas = Quotas(keys.quota, audit)
        self.budgets = Budgets(self.usage, keys.quota, keys.label, audit)

    # Letting in -----------------------------------------------------------------------------------------------------

    def admit(self, owner: str, run: str = "") -> None:
        self.quotas.admit(owner)
        self.usage.add(owner, run, Used(requests=1))

    async def admit_call(self, model: Model, call: Call) -> None:
        owner = model.run.owner
        if call.op in COMPUTES:
            await self.budgets.check(owner, model.run)
        if call.op in SAVES and not call.by_server:
            self.room(owner)
        if not call.by_server:
            model.line.admit(call.seq_id, model.sequencer.first_waiting, lambda: self.admit(owner, model.id))

    async def admit_sample(self, owner: str, run: str | None, of_snapshot: bool) -> None:
        """A run that has used its budget can still be sampled from where it was saved by name."""
        row = self.find_run(run) if run is not None and of_snapshot else None
        await self.budgets.check(owner, row)
        self.admit(owner, run or "")

    async def admit_model(self, owner: str, live: int, user_metadata: Mapping[str, str]) -> None:
        Budget.of_run(user_metadata)
        await self.budgets.check(owner)
        self.quotas.admit_adapter(owner, live)
        self.admit(owner)

    def room(self, owner: str) -> int | None:
        """Bytes of checkpoints the owner may still save, None for any number; refused if there are none."""
        return self.quotas.room(owner, self._checkpoints.bytes_of(owner))

    # Counting -------------------------------------------------------------------------------------------------------

    def metered(self, model: Model, call: Call, step: Step) -> Step:
        """The same step, counted: tokens once, with its answer; time whenever it is carried out."""
        party = (model.run.owner, model.id)
        tokens = token_count(call.body.data) if call.op in COMPUTES else 0
        used = Used(prompt_tokens=tokens) if call.op == "forward" else Used(trained_tokens=tokens)

        def start() -> Future[Any]:
            return self._timed(party, step.start())

        def answer(result: Any) -> Answer:
            told = step.answer(result)
            self._count(party, used)
            return told

        return replace(step, start=start, answer=answer)

    def sampled(
        self, owner: str, run: str | None, request: SampleRequest, work: Future[SampleResponse]
    ) -> Future[SampleResponse]:
        party = (owner, run or "")

        def count(done: Future[SampleResponse]) -> None:
            if not done.cancelled() and done.exception() is None:
                drawn = sum(len(sequence.tokens) for sequence in done.result().sequences)
                self._count(party, Used(prompt_tokens=request.prompt.length, sampled_tokens=drawn))

        work.add_done_callback(count)
        return self._timed(party, work)

    def _timed(self, party: Party, work: Future[Any]) -> Future[Any]:
        self._clock.begin(party)
        work.add_done_callback(lambda _: self.usage.add(*party, Used(engine_seconds=self._clock.end(party))))
        return work

    def _count(self, party: Party, used: Used) -> None:
        self.usage.add(*party, used)
        self.quotas.spend(party[0], used.tokens)
