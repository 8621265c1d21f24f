"""Sessions: what one client process owns, kept alive by heartbeats, given back when they stop.

Ending a session releases memory in the backend. It never deletes a checkpoint.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from sqlalchemy import select, true

from mint.errors import NotFound
from mint.server.auth import User
from mint.server.limits import Limits
from mint.server.store import SessionRow, Store


@dataclass
class Session:
    row: SessionRow
    last_seen: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.row.id


class Sessions:
    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._live: dict[str, Session] = {}

    def create(
        self,
        user: User,
        tags: list[str],
        user_metadata: dict[str, str],
        sdk_version: str | None,
        display_name: str | None,
        project_id: str | None,
    ) -> Session:
        row = SessionRow(
            id=str(uuid.uuid4()),
            owner=user.name,
            tags=tags,
            user_metadata=user_metadata,
            sdk_version=sdk_version,
            display_name=display_name,
            project_id=project_id,
        )
        self._store.add(row)
        self._live[row.id] = Session(row)
        return self._live[row.id]

    def touch(self, session_id: str, user: User) -> Session:
        """The session, seen just now; one from before a restart, or that was given up, lives again."""
        session = self._live.get(session_id)
        if session is None:
            session = Session(self.row(session_id, user))
        if session.row.owner != user.name:
            raise _unknown(session_id)
        self._live[session_id] = session
        session.last_seen = time.monotonic()
        return session

    def revive(self, session_id: str) -> bool:
        """A session from before a restart lives again, as if just seen; False if there was none."""
        row = self._store.get(SessionRow, session_id)
        if row is not None and session_id not in self._live:
            self._live[session_id] = Session(row)
        return row is not None

    def finish(self, session_id: str, user: User, reason: str) -> None:
        """The client says why it ends; the first reason stands."""
        session = self.touch(session_id, user)
        if session.row.ended is None:
            self._store.update(session.row, ended=reason)

    def row(self, session_id: str, user: User) -> SessionRow:
        row = self._store.get(SessionRow, session_id)
        if row is None or not user.sees(row.owner):
            raise _unknown(session_id)
        return row

    def page(self, user: User, accessible: bool, limit: int, offset: int) -> list[str]:
        mine = true() if accessible and user.admin else SessionRow.owner == user.name
        query = select(SessionRow).where(mine).order_by(SessionRow.created.desc())
        return [row.id for row in self._store.page(query, limit, offset)[0]]

    def owners(self) -> dict[str, str]:
        """The live sessions, and whose they are."""
        return {session.id: session.row.owner for session in self._live.values()}

    def end_of(self, owner: str) -> list[str]:
        """Forgets an owner's sessions; their ids."""
        ended = [session_id for session_id, whose in self.owners().items() if whose == owner]
        for session_id in ended:
            del self._live[session_id]
        return ended

    def expire(self) -> list[str]:
        """Forgets the sessions that fell silent; their ids."""
        now = time.monotonic()
        silent = [s.id for s in self._live.values() if now - s.last_seen > self._patience(s)]
        for session_id in silent:
            del self._live[session_id]
        return silent

    def _patience(self, session: Session) -> float:
        finished = session.row.ended is not None
        return self._limits.finished_idle_seconds if finished else self._limits.session_idle_seconds


def _unknown(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id!r} on this server; create a new ServiceClient.")
