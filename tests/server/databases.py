"""A PostgreSQL server of the tests' own: from the system's binaries, not as root, on a socket in /tmp."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
BOTH_DATABASES = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
"""For tests of what the database does; the others make do with SQLite."""
SPEED = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "max_connections=200", "listen_addresses=")


class Postgres:
    def __init__(self) -> None:
        if not BINARIES:
            pytest.skip("PostgreSQL is not installed (`make system-packages` does)")
        self.folder = Path(tempfile.mkdtemp(prefix="mint-pg-"))
        user = _user()
        if user:
            shutil.chown(self.folder, **user)
        data = self.folder / "data"
        initdb = [BINARIES[-1] / "initdb", "--pgdata", data, "--username", "mint", "--auth", "trust", "--no-sync"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=self.folder, **user)
        self.start()

    def start(self) -> None:
        """Until it answers."""
        settings = [word for setting in SPEED for word in ("-c", setting)]
        self._process = subprocess.Popen(
            [BINARIES[-1] / "postgres", "-D", self.folder / "data", "-k", self.folder, *settings],
            stderr=(self.folder / "log").open("w"),
            cwd=self.folder,
            preexec_fn=_end_with_parent,
            **_user(),
        )
        eventually(self._answers)

    def empty_database(self) -> str:
        """The URL of the one there is: a new one takes a thousand files, for each test too many."""
        self.end_connections()
        self.run("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        return f"postgresql://mint@/postgres?host={self.folder}"

    def end_connections(self) -> None:
        others = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
        self.run(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}")

    def run(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(f"host={self.folder} user=mint dbname=postgres", autocommit=True) as connection:
            connection.execute(statement)

    def _answers(self) -> bool:
        import psycopg

        assert self._process.poll() is None, (self.folder / "log").read_text()
        if not (self.folder / ".s.PGSQL.5432").exists():
            return False
        try:
            self.run("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def halt(self) -> None:
        """As when it is restarted by its own administrator: connections end, data stay."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGQUIT)  # at once
        self._process.wait()
        shutil.rmtree(self.folder)


def _user() -> dict[str, Any]:
    """PostgreSQL refuses to be run by root."""
    if os.geteuid() != 0:
        return {}
    found = pwd.getpwnam("postgres" if any(p.pw_name == "postgres" for p in pwd.getpwall()) else "nobody")
    return {"user": found.pw_uid, "group": found.pw_gid}


def _end_with_parent() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGQUIT)
