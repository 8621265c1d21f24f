"""Training models: adapters under training, each with its requests in order and its journal.

A model lives in the backend's memory and under one session; its journal brings it back after a crash. Its run, the row
that remembers it, stays.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import or_, select, true
from sqlalchemy.exc import OperationalError

from mint.backend import Backend, ModelFacts
from mint.doorbell import arriving
from mint.errors import BadRequest, Busy, MintError, NotFound
from mint.server.audit import Audit
from mint.server.auth import User
from mint.server.catalogue import Catalogue
from mint.server.checkpoints import Checkpoints
from mint.server.futures import Answer, Futures, Promise, json_answer
from mint.server.journal import Disk, Head, Journal, Place
from mint.server.limits import Limits
from mint.server.meter import Meter
from mint.server.queues import Load, Queues
from mint.server.quotas import Line
from mint.server.room import is_full
from mint.server.runner import Entry, Runner, StateMark, Step
from mint.server.sequencer import Sequencer
from mint.server.sessions import Session, Sessions
from mint.server.steps import CHANGE_FILES, CHANGE_WEIGHTS, Call
from mint.server.store import CheckpointRow, RunRow, Store
from mint.server.trial import Trial
from mint.types import LoraConfig, TrainingRun

log = logging.getLogger("mint.server")


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


class Models:
    prepare: Callable[[Model, Call], Step]
    """Says what a call does; `restore_call` reads one from the journal. Both are set once there is a whole server."""
    restore_call: Callable[[Head, bytes], Call]

    def __init__(
        self,
        backend: Backend,
        store: Store,
        catalogue: Catalogue,
        sessions: Sessions,
        checkpoints: Checkpoints,
        futures: Futures,
        limits: Limits,
        queues: Queues,
        disk: Disk,
        journals: Path,
        trial: Trial,
        meter: Meter,
        audit: Audit,
    ) -> None:
        self._backend = backend
        self._store = store
        self._catalogue = catalogue
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._futures = futures
        self._limits = limits
        self._queues = queues
        self._disk = disk
        self._journals = journals
        self._trial = trial
        self._meter = meter
        self._audit = audit
        self._making: dict[str, str] = {}  # ids of models whose journal is being begun, and their owners
        self._live: dict[str, Model] = {}
        self.corrupted: dict[str, str] = {}
        """Runs whose journal or state is damaged, and what is wrong."""

    # Life -----------------------------------------------------------------------------------------------------------

    async def create(
        self,
        session: Session,
        number: int,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str],
        fingerprint: bytes,
        source: tuple[CheckpointRow, bool] | None = None,
    ) -> Promise:
        """A new model, or with a source (checkpoint, optimizer too?) one that starts from there."""
        key = f"model_seq_id {number} of session {session.id}"
        if known := self._futures.repeated(key, fingerprint):
            await asyncio.shield(known.accepted)
            return known
        self._catalogue.check(base_model)
        owner, model_id = session.row.owner, run_id(session.id, number)
        if model_id not in self._live:
            await self._meter.admit_model(owner, self._count(owner), user_metadata)
        promise = self._futures.open(owner, key, fingerprint, session=session.id)
        self._meter.quotas.hold(owner, promise.settled)
        promise.envelope["model_id"] = model_id
        if model_id in self._live:
            promise.settle(_created(self._live[model_id]))
            promise.accepted.set_result(None)
            return promise
        if lora.seed is None:  # drawn here, so that the same weights can be drawn again
            lora = replace(lora, seed=secrets.randbits(63))
        created = {
            "model": model_id,
            "session": session.id,
            "owner": owner,
            "base_model": base_model,
            "lora": asdict(lora),
            "user_metadata": user_metadata,
            "request": promise.request_id,
            "key": key,
            "same": fingerprint.hex(),
            "source": None,
        }
        journal = Journal(self._journals / quote(model_id, safe=""), self._disk)
        self._making[model_id] = owner
        try:
            if source is not None:
                files = await asyncio.to_thread(self._checkpoints.fetch, source[0])
                pin = await asyncio.to_thread(journal.pin, promise.request_id, files)
                created["source"] = {"pin": pin.name, "optimizer": source[1], "path": source[0].path}
            await _begin(journal, {"kind": "segment", "created": created, "next": 1, "handled": []})
        except (MintError, OSError) as error:
            self._futures.drop(promise)
            journal.delete()
            refusal = error if isinstance(error, MintError) else Busy(f"the model could not be recorded: {error}.")
            promise.accepted.set_exception(refusal)
            promise.accepted.exception()
            promise.fail(refusal)
            raise refusal from error
        finally:
            del self._making[model_id]
        promise.accepted.set_result(None)
        self._audit.write("run_created", owner, model_id, base_model=base_model, rank=lora.rank)
        model = self.add(created, journal, Sequencer(self._limits.gap_seconds))
        promise.run(self.bring_up(model))
        return promise

    def _count(self, owner: str) -> int:
        """Models the owner has in memory, or is about to."""
        live = sum(model.run.owner == owner for model in self._live.values())
        return live + sum(making == owner for making in self._making.values())

    def live(self, model_id: str) -> Model | None:
        return self._live.get(model_id)

    def known_run(self, model_id: str) -> RunRow | None:
        """Whoever's it is: not for what a client is told."""
        model = self._live.get(model_id)
        return self._store.get(RunRow, model_id) if model is None else model.run

    def add(self, created: Head, journal: Journal, sequencer: Sequencer) -> Model:
        """A model that has a journal; `bring_up` makes it live in the backend."""
        run = self._store.get(RunRow, created["model"]) or _run_of(created)
        model: Model

        def prepare(entry: Entry) -> Step:
            return self.prepare(model, self.restore_call(entry.place.record.head, journal.payload(entry.place)))

        make = partial(self._make, created, journal)
        runner = Runner(self._backend, run.id, journal, self._trial, prepare, make)
        model = self._live[run.id] = Model(run, created, journal, runner, sequencer)
        sequencer.on_gap = partial(self._jump, model)
        return model

    def _make(self, created: Head, journal: Journal) -> list[Callable[[], Future[Any]]]:
        """The calls that make the adapter as it was before its first request."""
        model_id, lora, source = created["model"], LoraConfig(**created["lora"]), created["source"]
        calls: list[Callable[[], Future[Any]]] = [
            lambda: self._backend.create_adapter(model_id, created["base_model"], lora)
        ]
        if source is not None and journal.newest_state() is None:
            pin = str(journal.folder / source["pin"])
            calls.append(lambda: self._backend.load_adapter(model_id, pin, source["optimizer"]))
        return calls

    async def bring_up(self, model: Model) -> Answer:
        """Until the model is live in the backend: its first time, or again after a restart."""
        existed = self._store.get(RunRow, model.id) is not None
        try:
            model.facts = await self._catalogue.load(model.run.base_model)
            model.runner.start()
            await asyncio.shield(model.runner.ready)
            if not existed:
                await self._record(model.run)
        except MintError as error:
            model.runner.fail(error)
            if existed:
                self.corrupted[model.id] = str(error)
                log.error("training model %s could not be brought back: %s", model.id, error)
                raise
            self._live.pop(model.id, None)
            self._backend.release(model.id)
            model.journal.delete()
            raise
        return _created(model)

    async def _record(self, run: RunRow) -> None:
        """Where the disk is full, as soon as there is room."""
        deadline = time.monotonic() + self._limits.room_seconds
        while True:
            try:
                self._store.add(run)
                return
            except OperationalError as error:
                if not is_full(error):
                    raise
                if time.monotonic() > deadline:
                    raise Busy(f"the model could not be recorded: {error.orig}.") from error
            await asyncio.sleep(0.5)

    def find(self, model_id: str, user: User) -> Model:
        """The live model, its session seen just now."""
        model = self._live.get(model_id)
        if model is None or model.run.owner != user.name:
            raise self._gone(model_id, user)
        assert model.run.session_id is not None
        self._sessions.touch(model.run.session_id, user)
        model.last_request = time.time()
        return model

    def _gone(self, model_id: str, user: User) -> NotFound:
        run = self._store.get(RunRow, model_id)
        if run is None or run.owner != user.name:
            return NotFound(f"no training model {model_id!r} on this server; create one first.")
        newest = self._checkpoints.newest(model_id)
        then = (
            "It saved no checkpoint to go on from; create a new training client."
            if newest is None
            else f"Go on from its newest checkpoint: create_training_client_from_state_with_optimizer({newest.path!r})."
        )
        why = (
            "is no longer in memory: the server was restarted without it, the model unloaded, or its session silent "
            "for too long."
        )
        if model_id in self.corrupted:
            why = f"cannot be brought back: {self.corrupted[model_id]}"
        return NotFound(f"training model {model_id} {why} {then}")

    def unload(self, model: Model) -> Promise:
        promise = self._futures.open(model.run.owner)
        promise.on_cancel = _nothing
        self._live.pop(model.id, None)
        self._queues.forget(model.id)
        self._save_time(model)
        promise.run(self._end(model))
        return promise

    async def _end(self, model: Model) -> Answer:
        model.sequencer.close()
        await model.runner.close(NotFound(f"training model {model.id} was unloaded before this request's turn came."))
        await arriving(self._backend.release(model.id))
        await asyncio.to_thread(model.journal.delete)
        return json_answer({"model_id": model.id, "type": "unload_model"})

    def of_owner(self, owner: str) -> list[Model]:
        return [model for model in self._live.values() if model.run.owner == owner]

    def end_sessions(self, session_ids: Iterable[str]) -> None:
        ended = set(session_ids)
        for model in [m for m in self._live.values() if m.run.session_id in ended]:
            self.unload(model)

    # Requests -------------------------------------------------------------------------------------------------------

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
            step = self.prepare(model, call)
        except Busy:
            leave()
            raise
        except MintError:
            leave()
            self._skip(model, call.seq_id)
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
            self._consider_state(model, op)

        model.sequencer.submit(head["seq"], start)
        return entry

    def refuse(self, model_id: str, seq_id: int, user: User) -> None:
        """A request that could not be read has spent its number."""
        model = self._live.get(model_id)
        if model is not None and model.run.owner == user.name:
            self._skip(model, seq_id)

    def _skip(self, model: Model, seq_id: int | None) -> None:
        if seq_id is not None and not model.sequencer.seen(seq_id):
            head = {"kind": "skip", "seq": seq_id}
            model.journal.append(head, b"", lambda _: model.sequencer.skip(seq_id), flush=False)

    def _jump(self, model: Model, number: int) -> None:
        """The numbers before this one have been waited for long enough, unless one of them found no room."""
        if self._queues.expects(model.id):
            model.sequencer.jump(model.sequencer.following)
            return

        def written(outcome: Place | Busy) -> None:
            # Where that cannot be written down, the wait begins again.
            model.sequencer.jump(model.sequencer.following if isinstance(outcome, Busy) else number)

        model.journal.append({"kind": "jump", "seq": number}, b"", written)

    # States ---------------------------------------------------------------------------------------------------------

    def _consider_state(self, model: Model, op: str) -> None:
        """Begins a new segment when it is time: at best right after a step, when there are no gradients to be saved."""
        now, runner = time.monotonic(), model.runner
        if model.state_due is None:
            model.state_due = now + max(self._limits.state_seconds, 20 * runner.state_seconds)
        late = now - model.state_due
        full = model.journal.bytes_in_segment / self._limits.state_bytes
        if not (op == "optim_step" and (late > 0 or full > 1)) and not (late > self._limits.state_seconds or full > 2):
            return
        if runner.state_pending or model.sequencer.waiting or not model.journal.idle:
            return
        sequencer = model.sequencer
        header = {
            "kind": "segment",
            "created": model.created,
            "next": sequencer.following,
            "handled": sequencer.handled.runs,
        }

        def written(outcome: Place | Busy) -> None:
            if isinstance(outcome, Busy):
                runner.state_pending = False
            else:
                runner.take(StateMark(outcome.segment))

        runner.state_pending, model.state_due = True, None
        model.journal.begin_segment(header, written)

    # Runs -----------------------------------------------------------------------------------------------------------

    def run(self, model_id: str, user: User, accessible: bool = True) -> RunRow:
        """The run, live or not; others' if `accessible` and they published a checkpoint of it."""
        run = self._store.get(RunRow, model_id)
        published = accessible and self._checkpoints.has_published(model_id)
        if run is None or not (user.sees(run.owner) or published):
            raise NotFound(f"no training run {model_id!r}; list_training_runs() shows yours.")
        return run

    def runs(self, user: User, accessible: bool, limit: int, offset: int) -> tuple[list[RunRow], int]:
        mine = RunRow.owner == user.name
        published = RunRow.id.in_(select(CheckpointRow.run_id).where(CheckpointRow.public))
        reach = true() if user.admin else or_(mine, published)
        query = select(RunRow).where(reach if accessible else mine).order_by(RunRow.created.desc())
        rows, total = self._store.page(query, limit, offset)
        return list(rows), total

    def of_session(self, session_id: str) -> list[str]:
        query = select(RunRow).where(RunRow.session_id == session_id).order_by(RunRow.created)
        return [run.id for run in self._store.all(query)]

    def last_request(self, model_id: str) -> float | None:
        return self._live[model_id].last_request if model_id in self._live else None

    def describe(self, run: RunRow, user: User) -> TrainingRun:
        live = self._live.get(run.id)
        failed = live is not None and live.runner.failure is not None
        return self._checkpoints.describe_run(run, user, self.last_request(run.id), failed or run.id in self.corrupted)

    def overview(self) -> list[dict[str, Any]]:
        """The live models, for people."""
        return [
            {
                "model_id": model.id,
                "owner": model.run.owner,
                "base_model": model.run.base_model,
                "rank": model.run.rank,
                "idle_seconds": round(time.time() - model.last_request, 1),
            }
            for model in self._live.values()
        ]

    def sweep(self) -> None:
        self.save_times()
        for model in self._live.values():
            model.runner.start()  # where the engine was lost while nobody asked
            model.journal.trim(self._futures.holds)

    def close(self) -> None:
        self.save_times()
        for model in self._live.values():
            model.journal.close()

    def save_times(self) -> None:
        """When each model was last asked for something is kept in memory, and written down now and then."""
        for model in self._live.values():
            self._save_time(model)

    def _save_time(self, model: Model) -> None:
        if self._store.get(RunRow, model.id) is not None and model.last_request > model.run.last_request:
            self._store.update(model.run, last_request=model.last_request)


def run_id(session_id: str, number: int) -> str:
    """Clients that create a model by loading compute this id themselves."""
    return f"{session_id}:train:{number}"


def _nothing() -> None:
    """Cancelling the end of a model does this: one that is half gone is of no use to anybody."""


def _key(model: Model, seq_id: int | None) -> str | None:
    return None if seq_id is None else f"seq_id {seq_id} of model {model.id}"


async def _begin(journal: Journal, header: Head) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def written(outcome: Place | Busy) -> None:
        if isinstance(outcome, Busy):
            done.set_exception(outcome)
        else:
            done.set_result(None)

    journal.begin_segment(header, written)
    await done


def _run_of(created: Head) -> RunRow:
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


def _created(model: Model) -> Answer:
    if (source := model.created["source"]) is None:
        return json_answer({"model_id": model.id, "type": "create_model"})
    return json_answer({"model_id": model.id, "path": source["path"], "type": "load_weights"})
