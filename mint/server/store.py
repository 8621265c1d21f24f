"""The database: rows of sessions, runs, samplers and checkpoints, which outlive the process.

SQLite by default. Calls are short and direct; what changes with every request (heartbeats, results) stays in memory.
Times are seconds since 1970.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import JSON, ForeignKey, UniqueConstraint, create_engine, event, func, inspect, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.sql import Select


class Row(DeclarativeBase):
    type_annotation_map = {dict[str, str]: JSON, list[str]: JSON}  # noqa: RUF012


class SessionRow(Row):
    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    created: Mapped[float] = mapped_column(default=time.time)
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, str]]
    sdk_version: Mapped[str | None]
    display_name: Mapped[str | None]
    project_id: Mapped[str | None]
    ended: Mapped[str | None]
    """Why the client said it ended: success, errored or interrupted."""


class RunRow(Row):
    """A training model and its history, or the home of checkpoints that came from elsewhere."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    rank: Mapped[int]
    train_unembed: Mapped[bool]
    train_mlp: Mapped[bool]
    train_attn: Mapped[bool]
    created: Mapped[float] = mapped_column(default=time.time)
    last_request: Mapped[float] = mapped_column(default=time.time)
    user_metadata: Mapped[dict[str, str]]


class SamplerRow(Row):
    __tablename__ = "samplers"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str]
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    ephemeral: Mapped[bool]
    """True: a snapshot in memory, gone with the process."""
    created: Mapped[float] = mapped_column(default=time.time)


class CheckpointRow(Row):
    __tablename__ = "checkpoints"
    __table_args__ = (
        UniqueConstraint("run_id", "kind", "name"),
        {"sqlite_autoincrement": True},  # a deleted checkpoint's number is never another's: samplers go by it
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), index=True)
    kind: Mapped[str]
    name: Mapped[str]
    owner: Mapped[str] = mapped_column(index=True)
    folder: Mapped[str]
    """Relative to the folder of all checkpoints."""
    size_bytes: Mapped[int]
    created: Mapped[float] = mapped_column(default=time.time)
    expires: Mapped[float | None]
    public: Mapped[bool] = mapped_column(default=False)
    user_metadata: Mapped[dict[str, str] | None] = mapped_column(JSON)

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


R = TypeVar("R", bound=Row)


class Store:
    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._engine = create_engine(f"sqlite:///{file}")
        event.listen(self._engine, "connect", _set_pragmas)
        for table in Row.metadata.sorted_tables:
            try:
                table.create(self._engine, checkfirst=True)
            except OperationalError:  # another server on the same data made it between our look and our try
                table.create(self._engine, checkfirst=True)
        self._session = sessionmaker(self._engine, expire_on_commit=False)

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Session]:
        """For what takes several statements: all of them or none."""
        with self._session.begin() as session:
            yield session

    def check_writable(self) -> None:
        """Raises the reason if nothing can be written."""
        with self._session() as session:
            session.add(SessionRow(id="probe", owner="", tags=[], user_metadata={}))
            session.flush()
            session.rollback()

    def add(self, *rows: Row) -> None:
        with self._session.begin() as session:
            session.add_all(rows)

    def replace(self, old: Sequence[Row], new: Row | None = None) -> None:
        """Deletes and adds, both or neither; rows that another server deleted first are no matter."""
        with self._session.begin() as session:
            for row in old:
                if (stored := session.get(type(row), inspect(row).identity)) is not None:
                    session.delete(stored)
            session.flush()
            if new is not None:
                session.add(new)

    def get(self, kind: type[R], key: str | int) -> R | None:
        with self._session() as session:
            return session.get(kind, key)

    def update(self, row: Row, **values: Any) -> None:
        """Sets the values on the row given and in the database."""
        with self._session.begin() as session:
            stored = session.get_one(type(row), inspect(row).identity)
            for name, value in values.items():
                setattr(stored, name, value)
        for name, value in values.items():
            setattr(row, name, value)

    def all(self, query: Select[R]) -> Sequence[R]:
        with self._session() as session:
            return session.scalars(query).all()

    def page(self, query: Select[R], limit: int, offset: int) -> tuple[Sequence[R], int]:
        """One page of the rows and how many there are in all."""
        with self._session() as session:
            total = session.scalar(select(func.count()).select_from(query.order_by(None).subquery())) or 0
            return session.scalars(query.limit(limit).offset(offset)).all(), total


def is_full(error: Exception) -> bool:
    """Whether it was for lack of room on the disk that something could not be written."""
    return (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or (
        isinstance(error, OperationalError) and "full" in str(error.orig)
    )


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("busy_timeout=5000", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
