"""Full disks: how one is known by its error, and waiting for room while a server starts.

A server that runs refuses what it cannot write and goes on; one that starts has nothing to go on with.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import OperationalError

log = logging.getLogger("mint.server")

T = TypeVar("T")

ROOM_SECONDS = 300.0
"""How long a server that is started waits for room; clients retry a request for as long."""
_DATABASE_FULL = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_SHMSIZE", "53100")
"""What SQLite and PostgreSQL call it; without room, SQLite's shared memory cannot grow."""


def is_full(error: Exception) -> bool:
    """Whether it was for lack of room on the disk that something could not be written."""
    if isinstance(error, OperationalError):
        told = (getattr(error.orig, name, None) for name in ("sqlite_errorname", "sqlstate"))
        return "full" in str(error.orig) or any(name in _DATABASE_FULL for name in told)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def when_there_is_room(work: Callable[[], T]) -> T:
    """Does the work, again and again while the disk is full. Work that fails must leave nothing open."""
    deadline = time.monotonic() + ROOM_SECONDS
    while True:
        try:
            return work()
        except (OSError, OperationalError) as error:
            if not is_full(error) or time.monotonic() > deadline:
                raise
            log.warning("the disk is full (%s); waiting for room", error)
        time.sleep(0.5)
