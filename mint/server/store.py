"""The database: rows of sessions, runs, samplers and checkpoints, which outlive the process.

Calls are short and direct; what changes with every request (heartbeats, results) stays in memory. Times are seconds
since 1970. Which database it is, and its schema's history, live in `mint.server.database` and `mint.server.migrations`:
a change of the tables here needs a revision there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Integer, UniqueConstraint, func, insert, inspect, select
from sqlalchemy.exc import DataError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.sql import Select

from mint.errors import BadRequest
from mint.server.database import Database

LARGE = BigInteger().with_variant(Integer, "sqlite")
"""For numbers that may pass two thousand million, where PostgreSQL's integers end; SQLite's have no end."""


class Row(DeclarativeBase):
    type_annotation_map = {dict[str, str]: JSON, list[str]: JSON, float: Double}  # noqa: RUF012


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
    size_bytes: Mapped[int] = mapped_column(LARGE)
    created: Mapped[float] = mapped_column(default=time.time)
    expires: Mapped[float | None]
    public: Mapped[bool] = mapped_column(default=False)
    user_metadata: Mapped[dict[str, str] | None] = mapped_column(JSON)

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


class SettingRow(Row):
    """What all servers of one database must agree on."""

    __tablename__ = "settings"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


R = TypeVar("R", bound=Row)


class Store:
    def __init__(self, address: str | Path) -> None:
        """A URL, or the file of a SQLite database."""
        self._database = Database(address)
        self._sessions = sessionmaker(self._database.engine, expire_on_commit=False)

    def close(self) -> None:
        self._database.close()

    def alone(self, work: Callable[[], None]) -> bool:
        """Does the work if no other server has the database open; False if one has."""
        return self._database.alone(work)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """For what takes several statements: all of them or none."""
        with self._reading_faults(), self._sessions.begin() as session:
            yield session

    @contextmanager
    def _reading_faults(self) -> Iterator[None]:
        try:
            yield
        # PostgreSQL's for a zero character in a text or a number without end; SQLite's driver has its own for that.
        except (DataError, OverflowError) as error:
            reason = error.orig if isinstance(error, DataError) else error
            raise BadRequest(f"the database cannot hold what was given: {reason}.") from error

    def check_writable(self) -> None:
        """Raises the reason if nothing can be written."""
        with self._sessions() as session:
            session.add(SessionRow(id="probe", owner="", tags=[], user_metadata={}))
            session.flush()
            session.rollback()

    def add(self, *rows: Row) -> None:
        with self.transaction() as session:
            session.add_all(rows)

    def insert(self, *rows: Row) -> None:
        """As `add`, in half the time, for rows whose keys are given and whose values are all set."""
        with self._reading_faults(), self._database.engine.begin() as connection:
            for row in rows:
                state = inspect(row)
                values = {column.key: state.dict[column.key] for column in state.mapper.column_attrs}
                connection.execute(insert(type(row)), values)

    def replace(self, old: Sequence[Row], new: Row | None = None) -> None:
        """Deletes and adds, both or neither; rows that another server deleted first are no matter."""
        with self.transaction() as session:
            for row in old:
                if (stored := session.get(type(row), inspect(row).identity)) is not None:
                    session.delete(stored)
            session.flush()
            if new is not None:
                session.add(new)

    def get(self, kind: type[R], key: str | int) -> R | None:
        with self.transaction() as session:
            return session.get(kind, key)

    def update(self, row: Row, **values: Any) -> None:
        """Sets the values on the row given and in the database."""
        with self.transaction() as session:
            stored = session.get_one(type(row), inspect(row).identity)
            for name, value in values.items():
                setattr(stored, name, value)
        for name, value in values.items():
            setattr(row, name, value)

    def all(self, query: Select[R]) -> Sequence[R]:
        with self.transaction() as session:
            return session.scalars(query).all()

    def page(self, query: Select[R], limit: int, offset: int) -> tuple[Sequence[R], int]:
        """One page of the rows and how many there are in all."""
        with self.transaction() as session:
            total = session.scalar(select(func.count()).select_from(query.order_by(None).subquery())) or 0
            return session.scalars(query.limit(limit).offset(offset)).all(), total
