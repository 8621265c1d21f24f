"""A session: what groups the models and samplers of one script on the server, kept alive by heartbeats."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Literal

from mint.client.connection import DIALECT, Connection
from mint.client.futures import start
from mint.client.transport import Transport
from mint.config import ClientConfig
from mint.errors import MintError, NotFound

HEARTBEAT_EVERY = 10.0

Ending = Literal["success", "errored", "interrupted"]

logger = logging.getLogger("mint")


class Session:
    """Made on first use; numbers what is created in it."""

    def __init__(self, config: ClientConfig, user_metadata: Mapping[str, str] | None, project_id: str | None) -> None:
        self.connection = Connection(config)
        self.model_numbers = itertools.count()
        self.sampler_numbers = itertools.count()
        self._user_metadata = dict(user_metadata or {})
        self._project_id = project_id
        self._id: str | None = None
        self._lock = asyncio.Lock()
        self._heart: asyncio.Task[None] | None = None

    async def open(self) -> tuple[Transport, str]:
        """The transport and the session's id."""
        async with self._lock:
            transport = await self.connection.open()
            if self._id is None:
                self._id = await self._create(transport)
                self._heart = asyncio.create_task(_beat(weakref.ref(self), transport, self._id))
                _finish_at_exit(self)
            return transport, self._id

    async def _create(self, transport: Transport) -> str:
        body = {
            "tags": [],
            "user_metadata": self._user_metadata,
            "sdk_version": DIALECT,
            "type": "create_session",
        }
        if self._project_id is not None:
            body["project_id"] = self._project_id
        answer = await transport.post("create_session", body)
        for level in ("info", "warning", "error"):
            if text := answer.get(f"{level}_message"):
                getattr(logger, level)(text)
        return str(answer["session_id"])

    async def finish(self, ending: Ending, detail: str | None = None) -> None:
        """Tells the server that nothing more will come, and closes the connection. Once is enough."""
        async with self._lock:
            session_id, self._id = self._id, None
            if self._heart is not None:
                self._heart.cancel()
            if session_id is not None:
                transport = await self.connection.open()
                with contextlib.suppress(MintError):  # the server may have gone already, or not know of endings
                    body = {"reason": {"type": ending}, "detail": detail}
                    await transport.post(f"sessions/{session_id}/finish", body, patience=0.0, timeout=2.0)
            await self.connection.close()


async def _beat(session: weakref.ref[Session], transport: Transport, session_id: str) -> None:
    """Heartbeats until the session is gone from here or unknown there; a missed one is no news."""
    body = {"session_id": session_id, "type": "session_heartbeat"}
    while session() is not None:
        await asyncio.sleep(HEARTBEAT_EVERY)
        try:
            await transport.post("session_heartbeat", body, patience=0.0, timeout=10.0)
        except NotFound:
            return
        except MintError:
            continue


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_exit_hook_pid: int | None = None


def _finish_at_exit(session: Session) -> None:
    global _exit_hook_pid
    _open_sessions.add(session)
    if _exit_hook_pid != os.getpid():
        _exit_hook_pid = os.getpid()
        atexit.register(_finish_all, os.getpid())


def _finish_all(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the sessions are its parent's
    failure = getattr(sys, "last_type", None)
    ending: Ending = "success"
    if failure is not None:
        ending = "errored" if issubclass(failure, Exception) else "interrupted"
    finishing = [start(session.finish(ending)) for session in list(_open_sessions)]
    for future in finishing:
        with contextlib.suppress(Exception):  # at exit nothing is worth a traceback
            future.result(timeout=3.0)
