"""Opening the database: SQLite or PostgreSQL by URL, with a schema that is today's.

Every server holds a shared lock on its database for as long as it runs, and an exclusive one while it changes the
schema: so that happens once, when nobody else is there. What is in the tables is not known here.
"""

from __future__ import annotations

import fcntl
import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, OperationalError

from mint.errors import BadRequest, Busy, Internal
from mint.server import migrations
from mint.server.room import when_there_is_room

PATIENCE_SECONDS = 15.0
"""How long a server waits for others to leave a database whose schema it has to change."""
_SQLITE_PATIENCE = 5
"""Seconds a statement waits for the locks of other servers."""
_POSTGRES = "postgresql+psycopg"
_POSTGRES_TIMEOUTS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 15_000,
    "options": "-c statement_timeout=15000 -c lock_timeout=10000",
}
"""Calls are made on the event loop: none may wait for long on a database that has gone."""
_LOCK_NUMBER = 0x4D494E54  # "MINT": which of a PostgreSQL database's advisory locks is ours


class Database:
    def __init__(self, address: str | Path, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """A URL, or the file of a SQLite database."""
        url = _url_of(address)
        self.engine = _engine_of(url)
        self._lock = lock_of(self.engine)
        try:
            when_there_is_room(lambda: self._bring_up_to_date(patience_seconds))
        except BaseException:
            self.close()
            raise

    def _bring_up_to_date(self, patience_seconds: float) -> None:
        deadline = time.monotonic() + patience_seconds
        while True:
            if self._lock.try_shared():
                if migrations.is_current(self.engine):
                    return
                self._lock.release()
            if self._lock.try_exclusive():
                migrations.upgrade(self.engine)
                self._lock.share()
                return
            if time.monotonic() > deadline:
                raise Busy(
                    f"the schema of {self.engine.url.render_as_string()} must be brought from "
                    f"{migrations.revision_of(self.engine)} to {migrations.known_revisions()[-1]}, and other servers "
                    "are using it. End them, then start this one again."
                )
            time.sleep(random.uniform(0.02, 0.1))  # of two that start at once, one must come first

    def alone(self, work: Callable[[], None]) -> bool:
        """Does the work if no other server has the database open; False if one has."""
        try:
            if not self._lock.try_exclusive():
                return False
            work()
            return True
        finally:
            self._lock.share()

    def close(self) -> None:
        self._lock.close()
        self.engine.dispose()


def _url_of(address: str | Path) -> URL:
    if isinstance(address, Path):
        return URL.create("sqlite", database=str(address))
    try:
        url = make_url(address)
    except ArgumentError as error:
        raise BadRequest(
            "the database address cannot be read as a URL; give one like postgresql://user@host/mint or "
            "sqlite:////folder/mint.db."
        ) from error
    if url.drivername in ("postgres", "postgresql", _POSTGRES):
        return url.set(drivername=_POSTGRES)
    if url.drivername != "sqlite" or not url.database or url.database == ":memory:":
        raise BadRequest(
            f"the database {url.render_as_string()} cannot be used: it must be PostgreSQL "
            "(postgresql://user@host/mint) or a SQLite file (sqlite:////folder/mint.db)."
        )
    return url


def _engine_of(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        assert url.database is not None
        Path(url.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        engine = create_engine(url)
        event.listen(engine, "connect", _set_pragmas)
        return engine
    try:
        return create_engine(url, pool_pre_ping=True, connect_args=_POSTGRES_TIMEOUTS)
    except ImportError as error:
        raise Internal("PostgreSQL needs the psycopg driver: pip install 'mint-rl[postgres]'.") from error


def _set_pragmas(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={1000 * _SQLITE_PATIENCE}")
    _write_ahead(cursor)
    for pragma in ("synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _write_ahead(cursor: Any) -> None:
    """SQLite does not wait for others who change the mode of a new file at the same time, so that is done here."""
    deadline = time.monotonic() + _SQLITE_PATIENCE
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def lock_of(engine: Engine) -> Lock:
    return _FileLock(engine.url) if engine.dialect.name == "sqlite" else _AdvisoryLock(engine)


# Locks --------------------------------------------------------------------------------------------------------------


class Lock(Protocol):
    """On a whole database; ends with the process, however that ends."""

    def try_shared(self) -> bool: ...
    def try_exclusive(self) -> bool: ...

    def share(self) -> None:
        """Makes whatever is held a shared lock."""
        ...

    def release(self) -> None: ...
    def close(self) -> None: ...


class _FileLock:
    """Beside a SQLite file: of its own locks, the driver has the say."""

    def __init__(self, url: URL) -> None:
        self._descriptor = os.open(f"{url.database}.lock", os.O_RDWR | os.O_CREAT, 0o600)

    def try_shared(self) -> bool:
        return self._try(fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        return self._try(fcntl.LOCK_EX)

    def share(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class _AdvisoryLock:
    """Of a PostgreSQL database, held by a connection of its own."""

    def __init__(self, engine: Engine) -> None:
        try:
            self._connection: Connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        except OperationalError as error:
            raise Busy(f"the database {engine.url.render_as_string()} cannot be reached: {error.orig}") from error

    def try_shared(self) -> bool:
        return self._call("pg_try_advisory_lock_shared")

    def try_exclusive(self) -> bool:
        return self._call("pg_try_advisory_lock")

    def share(self) -> None:
        self._call("pg_advisory_lock_shared")  # a connection is never in its own way
        self._call("pg_advisory_unlock")

    def release(self) -> None:
        self._call("pg_advisory_unlock_shared")

    def close(self) -> None:
        self._connection.detach()  # closed, not pooled: the lock ends with it
        self._connection.close()

    def _call(self, function: str) -> bool:
        return bool(self._connection.exec_driver_sql(f"SELECT {function}({_LOCK_NUMBER})").scalar())
