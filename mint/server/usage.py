"""What each key and run used: counted in memory, added up in the database every few seconds.

A crash loses what was counted since: at most `Limits.usage_seconds` of it. Disk is not counted here: the catalogue of
checkpoints knows it at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from sqlalchemy import Select, func, select, update
from sqlalchemy.exc import IntegrityError

from mint.server.store import CheckpointRow, Store
from mint.server.tenant_rows import UsageRow
from mint.types import Usage

HOUR = 3600
_TRIES = 5


@dataclass
class Used:
    requests: int = 0
    prompt_tokens: int = 0
    """Prompts, and what was scored without training on it."""
    sampled_tokens: int = 0
    trained_tokens: int = 0
    engine_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampled_tokens + self.trained_tokens

    def add(self, other: Used) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.sampled_tokens += other.sampled_tokens
        self.trained_tokens += other.trained_tokens
        self.engine_seconds += other.engine_seconds


_COUNTS = [field.name for field in fields(Used)]
_SUMS = [func.coalesce(func.sum(getattr(UsageRow, name)), 0) for name in _COUNTS]


def _used(sums: Sequence[Any]) -> Used:
    """PostgreSQL sums whole numbers up to decimals."""
    requests, prompt, sampled, trained, seconds = sums
    return Used(int(requests), int(prompt), int(sampled), int(trained), float(seconds))


class Counter:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._new: dict[tuple[str, str, int], Used] = {}
        self._totals: dict[tuple[str, str | None], Used] = {}

    def add(self, owner: str, run: str, used: Used) -> None:
        hour = int(time.time()) // HOUR * HOUR
        with self._lock:
            self._new.setdefault((owner, run, hour), Used()).add(used)
            for key in ((owner, run), (owner, None)):
                if key in self._totals:
                    self._totals[key].add(used)

    def total(self, owner: str, run: str | None = None) -> Used:
        """All that the owner ever used, or used for this run. To be called where `flush` is, in one thread: then
        everything is either in the database or among what is new."""
        with self._lock:
            known = self._totals.get((owner, run))
        if known is not None:
            return known
        query = select(*_SUMS).where(UsageRow.owner == owner)
        with self._store.transaction() as session:
            row = session.execute(query if run is None else query.where(UsageRow.run == run)).one()
        total = _used(row)
        with self._lock:
            for (counted_owner, counted_run, _), used in self._new.items():
                if counted_owner == owner and run in (None, counted_run):
                    total.add(used)
            return self._totals.setdefault((owner, run), total)

    def flush(self) -> None:
        """Adds what is new to the database; what cannot be written is kept for the next time."""
        with self._lock:
            new, self._new = self._new, {}
            self._totals.clear()  # other servers may have added to them
        try:
            if new:
                self._write(new)
        except BaseException:
            with self._lock:
                for key, used in new.items():
                    self._new.setdefault(key, Used()).add(used)
            raise

    def _write(self, new: dict[tuple[str, str, int], Used]) -> None:
        for attempt in range(_TRIES):
            try:
                with self._store.transaction() as session:
                    for (owner, run, hour), used in new.items():
                        more = {name: getattr(UsageRow, name) + getattr(used, name) for name in _COUNTS}
                        there = (UsageRow.owner == owner, UsageRow.run == run, UsageRow.hour == hour)
                        counted = session.execute(update(UsageRow).where(*there).values(more).returning(UsageRow.hour))
                        if counted.first() is None:
                            counts = dict(zip(_COUNTS, astuple(used), strict=True))
                            session.add(UsageRow(owner=owner, run=run, hour=hour, **counts))
                            session.flush()
                return
            except IntegrityError:  # another server made the same row first
                if attempt == _TRIES - 1:
                    raise


def report(
    store: Store,
    label: Callable[[str], str],
    owner: str | None = None,
    run: str | None = None,
    since: float | None = None,
) -> list[Usage]:
    """Usage by owner (whose name `label` knows) and run, in whole hours from the one `since` lies in."""
    used: Select = select(UsageRow.owner, UsageRow.run, *_SUMS).group_by(UsageRow.owner, UsageRow.run)
    place = (CheckpointRow.owner, CheckpointRow.run_id)
    disk: Select = select(*place, func.sum(CheckpointRow.size_bytes)).group_by(*place)
    if owner is not None:
        used, disk = used.where(UsageRow.owner == owner), disk.where(CheckpointRow.owner == owner)
    if run is not None:
        used, disk = used.where(UsageRow.run == run), disk.where(CheckpointRow.run_id == run)
    if since is not None:
        used = used.where(UsageRow.hour >= int(since) // HOUR * HOUR)
    with store.transaction() as session:
        counts = {(row[0], row[1]): _used(row[2:]) for row in session.execute(used)}
        sizes = {(row[0], row[1]): int(row[2]) for row in session.execute(disk)}
    return [
        Usage(
            label(owner), owner, run, **asdict(counts.get((owner, run), Used())), disk_bytes=sizes.get((owner, run), 0)
        )
        for owner, run in sorted(counts.keys() | sizes.keys())
    ]
