"""Everything one running server holds, wired together, and the housekeeping that runs beside the requests."""

from __future__ import annotations

import asyncio
import logging

from mint.backend import Backend
from mint.config import ServerConfig
from mint.server.auth import Keys, Signer
from mint.server.catalogue import Catalogue
from mint.server.checkpoints import Checkpoints
from mint.server.futures import Futures
from mint.server.limits import Limits
from mint.server.models import Models
from mint.server.samplers import Samplers
from mint.server.sessions import Sessions
from mint.server.store import Store

log = logging.getLogger("mint.server")


class Server:
    def __init__(self, config: ServerConfig, backend: Backend, limits: Limits) -> None:
        self.config = config
        self.backend = backend
        self.limits = limits
        self.signer = Signer(config.data)
        self.keys = Keys(config.api_keys, self.signer)
        self.store = Store(config.data / "mint.db")
        self.catalogue = Catalogue(backend, config.models)
        self.futures = Futures(limits)
        self.sessions = Sessions(self.store, limits)
        self.checkpoints = Checkpoints(self.store, config.data / "checkpoints")
        self.models = Models(
            backend, self.store, self.catalogue, self.sessions, self.checkpoints, self.futures, limits.gap_seconds
        )
        self.samplers = Samplers(backend, self.store, self.catalogue, self.sessions, self.checkpoints, limits)

    async def start(self) -> None:
        """Loads the models this server is for; it is not ready before."""
        await asyncio.gather(*(self.catalogue.load(name) for name in self.config.models))

    async def keep_house(self) -> None:
        while True:
            await asyncio.sleep(self.limits.sweep_seconds)
            try:
                self.sweep()
            except Exception:  # a full disk, say, must not end all later sweeps
                log.exception("housekeeping failed; it is tried again in %s s", self.limits.sweep_seconds)

    def sweep(self) -> None:
        silent = self.sessions.expire()
        self.models.end_sessions(silent)
        self.samplers.end_sessions(silent)
        self.samplers.sweep()
        self.checkpoints.sweep()
        self.futures.sweep()
        self.models.save_times()

    def close(self) -> None:
        self.models.save_times()
        self.store.close()
