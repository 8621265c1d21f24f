"""Training models: adapters under training, each with its requests in order.

A model lives in the backend's memory and under one session; its run, the row that remembers it, stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import or_, select

from mint.backend import Backend, ModelFacts
from mint.errors import BadRequest, MintError, NotFound
from mint.server.auth import User
from mint.server.catalogue import Catalogue
from mint.server.checkpoints import Checkpoints
from mint.server.futures import Answer, Futures, Promise, json_answer
from mint.server.sequencer import Sequencer
from mint.server.sessions import Session, Sessions
from mint.server.store import CheckpointRow, RunRow, Store
from mint.types import LoraConfig


@dataclass(frozen=True)
class Step:
    """One request's work in the backend, and what its result is told as."""

    start: Callable[[], Future[Any]]
    answer: Callable[[Any], Answer]
    settled: Callable[[], None] | None = None
    """Called when it is over, well or badly."""


@dataclass(eq=False)
class Model:
    run: RunRow
    sequencer: Sequencer
    facts: ModelFacts | None = None
    failure: MintError | None = None
    last_request: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        return self.run.id


class Models:
    def __init__(
        self,
        backend: Backend,
        store: Store,
        catalogue: Catalogue,
        sessions: Sessions,
        checkpoints: Checkpoints,
        futures: Futures,
        gap_seconds: float,
    ) -> None:
        self._backend = backend
        self._store = store
        self._catalogue = catalogue
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._futures = futures
        self._gap_seconds = gap_seconds
        self._live: dict[str, Model] = {}

    # Life -----------------------------------------------------------------------------------------------------------

    def create(
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
            return known
        self._catalogue.check(base_model)
        promise = self._futures.open(session.row.owner, key, fingerprint)
        run = RunRow(
            id=run_id(session.id, number),
            session_id=session.id,
            owner=session.row.owner,
            base_model=base_model,
            rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
            user_metadata=user_metadata,
        )
        promise.envelope["model_id"] = run.id
        if run.id in self._live:
            promise.settle(_created(run, source))
        else:
            model = self._live[run.id] = Model(run, Sequencer(self._gap_seconds))
            promise.run(self._create(model, lora, source))
        return promise

    async def _create(self, model: Model, lora: LoraConfig, source: tuple[CheckpointRow, bool] | None) -> Answer:
        run = model.run
        try:
            model.facts = await self._catalogue.load(run.base_model)
            await asyncio.wrap_future(self._backend.create_adapter(run.id, run.base_model, lora))
            if source is not None:
                folder = str(self._checkpoints.folder(source[0]))
                await asyncio.wrap_future(self._backend.load_adapter(run.id, folder, source[1]))
        except MintError as error:
            model.failure = error
            self._live.pop(run.id, None)
            self._backend.release(run.id)
            raise
        finally:
            model.sequencer.open()
        if self._store.get(RunRow, run.id) is None:
            self._store.add(run)
        return _created(run, source)

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
        return NotFound(
            f"training model {model_id} is no longer in memory: the server was restarted, the model unloaded, or its "
            f"session silent for too long. {then}"
        )

    def unload(self, model: Model) -> Promise:
        promise = self._futures.open(model.run.owner)
        self._live.pop(model.id, None)
        self._save_time(model)
        promise.start(
            lambda: self._backend.release(model.id),
            lambda _: json_answer({"model_id": model.id, "type": "unload_model"}),
        )
        return promise

    def end_sessions(self, session_ids: Iterable[str]) -> None:
        ended = set(session_ids)
        for model in [m for m in self._live.values() if m.run.session_id in ended]:
            self.unload(model)

    # Requests -------------------------------------------------------------------------------------------------------

    def submit(self, model: Model, seq_id: int | None, fingerprint: bytes, prepare: Callable[[], Step]) -> Promise:
        """Puts one request in its place. `prepare` makes the last checks; whoever it refuses has spent the number."""
        key = None if seq_id is None else f"seq_id {seq_id} of model {model.id}"
        if known := self._futures.repeated(key, fingerprint):
            return known
        if seq_id is not None and model.sequencer.seen(seq_id):
            raise BadRequest(f"{key} was carried out long ago and its result is no longer kept.")
        try:
            step = prepare()
        except MintError:
            model.sequencer.skip(seq_id)
            raise
        promise = self._futures.open(model.run.owner, key, fingerprint)
        promise.envelope["model_id"] = model.id
        if (settled := step.settled) is not None:
            promise.settled.add_done_callback(lambda _: settled())

        def start() -> None:
            if model.failure is not None:
                promise.fail(model.failure)
            else:
                promise.start(step.start, step.answer)

        model.sequencer.submit(seq_id, start)
        return promise

    def refuse(self, model_id: str, seq_id: int, user: User) -> None:
        """A request that could not be read has spent its number."""
        model = self._live.get(model_id)
        if model is not None and model.run.owner == user.name and not model.sequencer.seen(seq_id):
            model.sequencer.skip(seq_id)

    # Runs -----------------------------------------------------------------------------------------------------------

    def run(self, model_id: str, user: User, accessible: bool = True) -> RunRow:
        """The run, live or not; others' if `accessible` and they published a checkpoint of it."""
        run = self._store.get(RunRow, model_id)
        published = accessible and any(c.public for c in self._checkpoints.of_run(model_id))
        if run is None or not (run.owner == user.name or published):
            raise NotFound(f"no training run {model_id!r}; list_training_runs() shows yours.")
        return run

    def runs(self, user: User, accessible: bool, limit: int, offset: int) -> tuple[list[RunRow], int]:
        mine = RunRow.owner == user.name
        published = RunRow.id.in_(select(CheckpointRow.run_id).where(CheckpointRow.public))
        query = select(RunRow).where(or_(mine, published) if accessible else mine).order_by(RunRow.created.desc())
        rows, total = self._store.page(query, limit, offset)
        return list(rows), total

    def of_session(self, session_id: str) -> list[str]:
        query = select(RunRow).where(RunRow.session_id == session_id).order_by(RunRow.created)
        return [run.id for run in self._store.all(query)]

    def last_request(self, model_id: str) -> float | None:
        return self._live[model_id].last_request if model_id in self._live else None

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


def _created(run: RunRow, source: tuple[CheckpointRow, bool] | None) -> Answer:
    if source is None:
        return json_answer({"model_id": run.id, "type": "create_model"})
    return json_answer({"model_id": run.id, "path": source[0].path, "type": "load_weights"})
