"""Everything one running server holds, wired together, and the housekeeping that runs beside the requests."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from sqlalchemy.exc import OperationalError

from mint.backend import Backend
from mint.config import ServerConfig
from mint.server import budgets
from mint.server.audit import Audit
from mint.server.auth import Keys
from mint.server.catalogue import Catalogue
from mint.server.checkpoints import Checkpoints, agree_on_storage
from mint.server.futures import Futures
from mint.server.home import Home
from mint.server.journal import Disk
from mint.server.keyring import Keyring
from mint.server.limits import Limits
from mint.server.meter import Meter
from mint.server.metrics import Status, Traffic
from mint.server.models import Models
from mint.server.policies import Policies
from mint.server.queues import Queues
from mint.server.recovery import recover
from mint.server.samplers import Samplers
from mint.server.sessions import Sessions
from mint.server.signer import Signer
from mint.server.steps import call_from, prepare, save_and_stop
from mint.server.storage import Storage, open_storage
from mint.server.store import Store
from mint.server.trial import Trial

log = logging.getLogger("mint.server")


def open_store(config: ServerConfig) -> tuple[Store, Storage]:
    """The database, its schema up to date, and the place of its checkpoints."""
    config.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    storage = open_storage(config.checkpoints, config.data)
    store = Store(config.database_address)
    try:
        if config.database or config.checkpoints:  # else both are in the data folder, and belong together
            agree_on_storage(store, storage)
    except BaseException:
        store.close()
        storage.close()
        raise
    return store, storage


class Server:
    def __init__(self, config: ServerConfig, backend: Backend, limits: Limits, traffic: Traffic) -> None:
        self.config = config
        self.backend = backend
        self.limits = limits
        self.signer = Signer(config.data)
        self.audit = Audit(config.data)
        self.store, storage = open_store(config)
        try:
            self.home = Home(config.data / "journal", config.port)
        except BaseException:
            self.store.close()
            storage.close()
            raise
        self.keys = Keys(config.api_keys, Keyring(self.store), self.signer, limits.keys_seconds)
        self.catalogue = Catalogue(backend, config.models)
        self.futures = Futures(limits)
        self.queues = Queues(limits)
        self.traffic = traffic
        self.disk = Disk(traffic.flushes.observe)
        self.status = Status(self)
        self.sessions = Sessions(self.store, limits)
        self.checkpoints = Checkpoints(self.store, storage)
        self.meter = Meter(self.keys, self.store, self.checkpoints, self.audit)
        trial = Trial()
        self.models = Models(
            backend,
            self.store,
            self.catalogue,
            self.sessions,
            self.checkpoints,
            self.futures,
            limits,
            self.queues,
            self.disk,
            self.home.models,
            trial,
            self.meter,
            self.audit,
        )
        self.models.prepare = partial(prepare, self)
        self.models.restore_call = partial(call_from, self)
        self.meter.find_run = self.models.known_run
        self.meter.budgets.save = partial(save_and_stop, self, budgets.CHECKPOINT)
        self.policies = Policies(backend, self.catalogue, self.checkpoints, trial)
        self.samplers = Samplers(
            backend, self.policies, self.store, self.sessions, limits, self.queues, self.home.snapshots, self.meter
        )

    async def start(self) -> None:
        """Loads the models this server is for, and takes up what an earlier one left; it is not ready before."""
        await asyncio.gather(*(self.catalogue.load(name) for name in self.config.models))
        await recover(self)

    async def keep_house(self) -> None:
        while True:
            await asyncio.sleep(self.limits.sweep_seconds)
            self.sweep()
            await self.status.engine()

    def end_sessions(self, session_ids: list[str]) -> None:
        """What these sessions hold goes; checkpoints stay."""
        self.models.end_sessions(session_ids)
        self.samplers.end_sessions(session_ids)
        self.futures.end_sessions(session_ids)

    def sweep(self) -> None:
        """Each whatever becomes of the others: on a full disk, one may make the room that another lacks."""
        again = self.limits.sweep_seconds
        for chore in (
            self._end_silent_sessions,
            self.samplers.sweep,
            self.checkpoints.sweep,
            self.futures.sweep,
            self.models.sweep,
            self.meter.usage.flush,
        ):
            try:
                chore()
            except OperationalError as error:
                log.warning("housekeeping failed (%s); it is tried again in %s s", error.orig, again)
            except Exception:
                log.exception("housekeeping failed; it is tried again in %s s", again)

    def _end_silent_sessions(self) -> None:
        self.end_sessions(self.sessions.expire())

    def close(self) -> None:
        self.models.close()
        try:
            self.meter.usage.flush()
        except OperationalError as error:  # a full disk, say: the rest is closed all the same
            log.warning("what was used last could not be written to the database: %s", error.orig)
        self.checkpoints.close()
        self.store.close()
        self.home.close()
