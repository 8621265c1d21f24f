"""How a request of a training model comes to its turn: checked, counted, written to the journal, put in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from mint.errors import BadRequest, Busy, MintError
from mint.server.futures import Futures, Promise
from mint.server.journal import Place
from mint.server.limits import Limits
from mint.server.meter import Meter
from mint.server.model import Model
from mint.server.queues import Load, Queues
from mint.server.runner import Entry, Step
from mint.server.steps import CHANGE_FILES, CHANGE_WEIGHTS, Call


class Intake:
    def __init__(
        self,
        futures: Futures,
        queues: Queues,
        limits: Limits,
        meter: Meter,
        prepare: Callable[[Model, Call], Step],
    ) -> None:
        self._futures = futures
        self._queues = queues
        self._limits = limits
        self._meter = meter
        self._prepare = prepare

    async def submit(self, model: Model, call: Call) -> Promise:
        """Checks one request, writes it to the journal and puts it in its place. Whoever is refused by the checks has
        spent the number; whoever is refused for lack of room, or by a limit that time lifts, has not."""
        key = _key(model, call.seq_id)
        if known := self._futures.repeated(key, call.same):
            await asyncio.shield(known.accepted)
            return known
        if call.seq_id is not None and model.sequencer.seen(call.seq_id):
            raise BadRequest(f"{key} was carried out long ago and its result is no longer kept.")
        leave = _nothing
        try:
            await self._meter.admit_call(model, call)
            load = Load(model.run.session_id, requests=1, bytes=call.size, model=model.id)
            leave = self._queues.enter_in_order(load, call.seq_id, model.sequencer.following)
            step = self._prepare(model, call)
        except Busy:
            leave()
            raise
        except MintError:
            leave()
            self.skip(model, call.seq_id)
            raise
        except Exception:  # the database is away, say: it may be sent again under its number
            leave()
            raise
        promise = self._futures.open(
            model.run.owner, key, call.same, request_id=call.request_id, session=model.run.session_id
        )
        promise.settled.add_done_callback(lambda _: leave())
        self._meter.quotas.hold(model.run.owner, promise.settled)
        promise.envelope["model_id"] = model.id

        def written(outcome: Place | Busy) -> None:
            if isinstance(outcome, Busy):
                self._futures.drop(promise)
                leave()
                if step.settled is not None:
                    step.settled()
                promise.fail(outcome)
                promise.accepted.set_exception(outcome)
            else:
                if step.accepted is not None:
                    step.accepted(promise)
                promise.accepted.set_result(None)
                self.enter(model, outcome, promise, step)

        model.journal.append(call.head(), call.payload, written)
        await asyncio.shield(promise.accepted)
        return promise

    def enter(self, model: Model, place: Place, promise: Promise, step: Step | None = None) -> Entry:
        """A journalled request takes its place in the order."""
        head = place.record.head
        op = head["op"]
        entry = Entry(place, promise, op in CHANGE_WEIGHTS, op in CHANGE_FILES, step)
        promise.on_cancel = partial(model.runner.cancel, entry)

        def start() -> None:
            model.runner.take(entry)
            model.consider_state(op, self._limits)

        model.sequencer.submit(head["seq"], start)
        return entry

    def skip(self, model: Model, seq_id: int | None) -> None:
        """A request that was refused has spent its number."""
        if seq_id is not None and not model.sequencer.seen(seq_id):
            head = {"kind": "skip", "seq": seq_id}
            model.journal.append(head, b"", lambda _: model.sequencer.skip(seq_id), flush=False)

    def jump(self, model: Model, number: int) -> None:
        """The numbers before this one have been waited for long enough, unless one of them found no room."""
        if self._queues.expects(model.id):
            model.sequencer.jump(model.sequencer.following)
            return

        def written(outcome: Place | Busy) -> None:
            # Where that cannot be written down, the wait begins again.
            model.sequencer.jump(model.sequencer.following if isinstance(outcome, Busy) else number)

        model.journal.append({"kind": "jump", "seq": number}, b"", written)


def _nothing() -> None:
    """What leaving costs whoever has not entered."""


def _key(model: Model, seq_id: int | None) -> str | None:
    return None if seq_id is None else f"seq_id {seq_id} of model {model.id}"
