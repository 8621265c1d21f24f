"""The rows that remember training models: they stay when the model itself is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from sqlalchemy import or_, select, true
from sqlalchemy.exc import OperationalError

from mint.errors import Busy, NotFound
from mint.server.auth import User
from mint.server.checkpoints import Checkpoints
from mint.server.limits import Limits
from mint.server.model import Model
from mint.server.room import is_full
from mint.server.store import CheckpointRow, RunRow, Store

log = logging.getLogger("mint.server")


class Runs:
    def __init__(self, store: Store, checkpoints: Checkpoints, limits: Limits) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._limits = limits

    def get(self, run_id: str) -> RunRow | None:
        """Whoever's it is: not for what a client is told."""
        return self._store.get(RunRow, run_id)

    def find(self, run_id: str, user: User, accessible: bool) -> RunRow:
        """Others' too if `accessible` and they published a checkpoint of it."""
        run = self.get(run_id)
        published = accessible and self._checkpoints.has_published(run_id)
        if run is None or not (user.sees(run.owner) or published):
            raise NotFound(f"no training run {run_id!r}; list_training_runs() shows yours.")
        return run

    def page(self, user: User, accessible: bool, limit: int, offset: int) -> tuple[list[RunRow], int]:
        mine = RunRow.owner == user.name
        published = RunRow.id.in_(select(CheckpointRow.run_id).where(CheckpointRow.public))
        reach = true() if user.admin else or_(mine, published)
        query = select(RunRow).where(reach if accessible else mine).order_by(RunRow.created.desc())
        rows, total = self._store.page(query, limit, offset)
        return list(rows), total

    def of_session(self, session_id: str) -> list[str]:
        query = select(RunRow).where(RunRow.session_id == session_id).order_by(RunRow.created)
        return [run.id for run in self._store.all(query)]

    async def record(self, run: RunRow) -> None:
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

    def save_times(self, models: Iterable[Model]) -> None:
        """When a model was last asked for something is kept in memory, and written down now and then. Where that is not
        possible, as on a full disk, everything else is done all the same: it may be what makes room."""
        try:
            for model in models:
                if self.get(model.id) is not None and model.last_request > model.run.last_request:
                    self._store.update(model.run, last_request=model.last_request)
        except OperationalError as error:
            log.warning("when models were last asked for something could not be written down: %s", error.orig)

    def gone(self, run_id: str, user: User, damage: str | None) -> NotFound:
        """What to tell whoever asks for a model that is not live: from where to go on."""
        run = self.get(run_id)
        if run is None or run.owner != user.name:
            return NotFound(f"no training model {run_id!r} on this server; create one first.")
        newest = self._checkpoints.newest(run_id)
        then = (
            "It saved no checkpoint to go on from; create a new training client."
            if newest is None
            else f"Go on from its newest checkpoint: create_training_client_from_state_with_optimizer({newest.path!r})."
        )
        why = (
            "is no longer in memory: the server was restarted without it, the model unloaded, or its session silent "
            "for too long."
            if damage is None
            else f"cannot be brought back: {damage}"
        )
        return NotFound(f"training model {run_id} {why} {then}")
