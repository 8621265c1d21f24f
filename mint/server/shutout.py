"""What becomes of the work of a key that is let in no more: revoked, expired, or no longer given at the start.

Its requests are refused from then on (`mint.server.auth`). What it had under way is cancelled, each of its training
models is saved under a name of its own, where an administrator finds it, and everything it held in memory goes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from mint.server.auth import HOUSE
from mint.server.steps import save_and_stop

if TYPE_CHECKING:
    from mint.server.state import Server

log = logging.getLogger("mint.server")

CHECKPOINT = "key-stop"
LEAST_SECONDS = 0.05
AGAIN_SECONDS = 30.0
"""When a model that could not be saved, because the disk is full, say, is tried again."""


async def keep_out(server: Server) -> None:
    """Looks as often as keys are looked at, for as long as the server runs."""
    stopping: dict[str, asyncio.Task[None]] = {}
    while True:
        await asyncio.sleep(max(LEAST_SECONDS, server.limits.keys_seconds))
        for owner in _shut_out(server):
            if owner not in stopping or stopping[owner].done():
                stopping[owner] = asyncio.create_task(_stop(server, owner))


def _shut_out(server: Server) -> set[str]:
    """Owners who have something here, and no key. The house keeps what it made before there were keys."""
    present = {*server.sessions.owners().values(), *server.futures.owners(), *server.samplers.owners()} - {HOUSE}
    return {owner for owner in present if server.keys.holder(owner) is None}


async def _stop(server: Server, owner: str) -> None:
    models = server.models.of_owner(owner)
    for model in models:
        model.runner.stop()
    server.futures.cancel_of(owner)
    server.samplers.cancel_of(owner)
    try:
        saved = [await save_and_stop(server, CHECKPOINT, model.id) for model in models]
    except Exception:  # a border: whatever it was, the models and their journals stay
        log.exception("work of the shut out key %s could not be saved; tried again in %g s", owner, AGAIN_SECONDS)
        await asyncio.sleep(AGAIN_SECONDS)
        return
    if ended := server.sessions.end_of(owner):
        server.end_sessions(ended)
        server.audit.write("key_shut_out", owner, result="stopped", saved=[path for path in saved if path is not None])
