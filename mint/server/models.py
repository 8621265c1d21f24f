"""The training models of a server: made, found, brought back, unloaded, and asked.

A model lives in the backend's memory and under one session; its journal brings it back after a crash. Its run, the row
that remembers it, stays (`runs`). How a request comes to its turn is in `intake`, what belongs to one model in `model`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mint.backend import Backend
from mint.doorbell import arriving
from mint.errors import Busy, MintError, NotFound
from mint.server.audit import Audit
from mint.server.auth import User
from mint.server.catalogue import Catalogue
from mint.server.checkpoints import Checkpoints
from mint.server.futures import Answer, Futures, Promise, json_answer
from mint.server.intake import Intake
from mint.server.journal import Disk, Head, Journal, Place
from mint.server.limits import Limits
from mint.server.meter import Meter
from mint.server.model import Model, created_answer, row_of, run_id
from mint.server.queues import Queues
from mint.server.runner import Entry, Runner, Step
from mint.server.runs import Runs
from mint.server.sequencer import Sequencer
from mint.server.sessions import Session, Sessions
from mint.server.steps import Call
from mint.server.store import CheckpointRow, RunRow, Store
from mint.server.trial import Trial
from mint.types import LoraConfig, TrainingRun

__all__ = ["Model", "Models", "run_id"]

log = logging.getLogger("mint.server")


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
        self._runs = Runs(store, checkpoints, limits)
        self._intake = Intake(futures, queues, limits, meter, lambda model, call: self.prepare(model, call))
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
            promise.settle(created_answer(self._live[model_id]))
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
        journal = await self._begin(created, promise, source)
        promise.accepted.set_result(None)
        self._audit.write("run_created", owner, model_id, base_model=base_model, rank=lora.rank)
        model = self.add(created, journal, Sequencer(self._limits.gap_seconds))
        promise.run(self.bring_up(model))
        return promise

    async def _begin(self, created: Head, promise: Promise, source: tuple[CheckpointRow, bool] | None) -> Journal:
        """The journal of a model to be, with all that is needed to make it; without it the request was never made."""
        model_id = created["model"]
        journal = Journal(self._journals / quote(model_id, safe=""), self._disk)
        self._making[model_id] = created["owner"]
        try:
            if source is not None:
                files = await asyncio.to_thread(self._checkpoints.fetch, source[0])
                pin = await asyncio.to_thread(journal.pin, promise.request_id, files)
                created["source"] = {"pin": pin.name, "optimizer": source[1], "path": source[0].path}
            await _first_segment(journal, {"kind": "segment", "created": created, "next": 1, "handled": []})
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
        return journal

    def _count(self, owner: str) -> int:
        """Models the owner has in memory, or is about to."""
        live = sum(model.run.owner == owner for model in self._live.values())
        return live + sum(making == owner for making in self._making.values())

    def live(self, model_id: str) -> Model | None:
        return self._live.get(model_id)

    def known_run(self, model_id: str) -> RunRow | None:
        """Whoever's it is: not for what a client is told."""
        model = self._live.get(model_id)
        return self._runs.get(model_id) if model is None else model.run

    def add(self, created: Head, journal: Journal, sequencer: Sequencer) -> Model:
        """A model that has a journal; `bring_up` makes it live in the backend."""
        run = self._runs.get(created["model"]) or row_of(created)
        model: Model

        def prepare(entry: Entry) -> Step:
            return self.prepare(model, self.restore_call(entry.place.record.head, journal.payload(entry.place)))

        make = partial(self._make, created, journal)
        runner = Runner(self._backend, run.id, journal, self._trial, prepare, make)
        model = self._live[run.id] = Model(run, created, journal, runner, sequencer)
        sequencer.on_gap = partial(self._intake.jump, model)
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
        existed = self._runs.get(model.id) is not None
        try:
            model.facts = await self._catalogue.load(model.run.base_model)
            model.runner.start()
            await asyncio.shield(model.runner.ready)
            if not existed:
                await self._runs.record(model.run)
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
        return created_answer(model)

    def find(self, model_id: str, user: User) -> Model:
        """The live model, its session seen just now."""
        model = self._live.get(model_id)
        if model is None or model.run.owner != user.name:
            raise self._runs.gone(model_id, user, self.corrupted.get(model_id))
        assert model.run.session_id is not None
        self._sessions.touch(model.run.session_id, user)
        model.last_request = time.time()
        return model

    def unload(self, model: Model) -> Promise:
        promise = self._futures.open(model.run.owner)
        promise.on_cancel = _nothing
        self._live.pop(model.id, None)
        self._queues.forget(model.id)
        self._runs.save_times([model])
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
        return await self._intake.submit(model, call)

    def enter(self, model: Model, place: Place, promise: Promise) -> Entry:
        """A request found in the journal takes its place in the order."""
        return self._intake.enter(model, place, promise)

    def refuse(self, model_id: str, seq_id: int, user: User) -> None:
        """A request that could not be read has spent its number."""
        model = self._live.get(model_id)
        if model is not None and model.run.owner == user.name:
            self._intake.skip(model, seq_id)

    # Runs -----------------------------------------------------------------------------------------------------------

    def run(self, model_id: str, user: User, accessible: bool = True) -> RunRow:
        """The run, live or not; others' if `accessible` and they published a checkpoint of it."""
        return self._runs.find(model_id, user, accessible)

    def runs(self, user: User, accessible: bool, limit: int, offset: int) -> tuple[list[RunRow], int]:
        return self._runs.page(user, accessible, limit, offset)

    def of_session(self, session_id: str) -> list[str]:
        return self._runs.of_session(session_id)

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
        self._runs.save_times(self._live.values())
        for model in self._live.values():
            model.runner.start()  # where the engine was lost while nobody asked
            model.journal.trim(self._futures.holds)

    def close(self) -> None:
        self._runs.save_times(self._live.values())
        for model in self._live.values():
            model.journal.close()


def _nothing() -> None:
    """Cancelling the end of a model does this: one that is half gone is of no use to anybody."""


async def _first_segment(journal: Journal, header: Head) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def written(outcome: Place | Busy) -> None:
        if isinstance(outcome, Busy):
            done.set_exception(outcome)
        else:
            done.set_result(None)

    journal.begin_segment(header, written)
    await done
