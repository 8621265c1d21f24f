"""What a key may do right now: how many requests and tokens a minute, how many requests at once.

A refusal is a 429 that names the limit, its size and when to come again. Tokens are charged when they have been read,
sampled or trained, so a request is let in while there is anything left and may overdraw; then nothing is let in until
the debt is paid off, and over time the limit is kept exactly.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from mint.errors import Busy
from mint.server.audit import Audit
from mint.server.keyring import Quota

ROOM_SECONDS = 10.0
"""When to come again for something that is given back by the client's own doing: an adapter, room on the disk."""
CONCURRENT_SECONDS = 1.0


class Limited(Busy):
    """A key has used up one of its limits."""

    queue_state = "paused_rate_limit"

    def __init__(self, limit: str, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.retry_after = max(1, math.ceil(retry_after))


class Bucket:
    """So many a minute, saved up for one minute at most."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled = clock()

    def take(self, amount: float) -> None:
        """May leave less than nothing."""
        self._fill()
        self._level -= amount

    def wait(self, amount: float) -> float:
        """Seconds until there is this much, or all that a minute gives if that is less."""
        self._fill()
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * 60 / self.per_minute)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled) * self.per_minute / 60)
        self._filled = now


class _Tenant:
    def __init__(self) -> None:
        self.under_way = 0
        self.buckets: dict[str, Bucket] = {}

    def bucket(self, limit: str, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            self.buckets.pop(limit, None)
            return None
        if limit not in self.buckets or self.buckets[limit].per_minute != per_minute:
            self.buckets[limit] = Bucket(per_minute)
        return self.buckets[limit]


class Quotas:
    def __init__(self, quota: Callable[[str], Quota], audit: Audit) -> None:
        """`quota`: the present limits of an owner."""
        self._quota = quota
        self._audit = audit
        self._tenants: dict[str, _Tenant] = {}
        self._lock = threading.Lock()  # tokens are charged by the backend's threads

    def admit(self, owner: str) -> None:
        """One more request, or `Limited`."""
        quota = self._quota(owner)
        if quota.concurrent is not None and self._tenant(owner).under_way >= quota.concurrent:
            self.refuse(
                owner,
                "concurrent",
                f"this key has {quota.concurrent} requests under way, as many as it may (concurrent); one more can be "
                "sent when one of them is done.",
                CONCURRENT_SECONDS,
            )
        if (wait := self._wait(owner, "tokens_per_minute", quota.tokens_per_minute, 1)) > 0:
            self._refuse_rate(owner, "tokens_per_minute", quota.tokens_per_minute, wait)
        if (wait := self._wait(owner, "requests_per_minute", quota.requests_per_minute, 1)) > 0:
            self._refuse_rate(owner, "requests_per_minute", quota.requests_per_minute, wait)
        self._take(owner, "requests_per_minute", quota.requests_per_minute, 1)

    def spend(self, owner: str, tokens: int) -> None:
        self._take(owner, "tokens_per_minute", self._quota(owner).tokens_per_minute, tokens)

    def hold(self, owner: str, until: asyncio.Future[Any]) -> None:
        """A request that was let in is under way until this is done."""
        tenant = self._tenant(owner)
        tenant.under_way += 1

        def done(_: object) -> None:
            tenant.under_way -= 1

        until.add_done_callback(done)

    def admit_adapter(self, owner: str, live: int) -> None:
        most = self._quota(owner).adapters
        if most is not None and live >= most:
            self.refuse(
                owner,
                "adapters",
                f"this key has {live} training models at once, and may have {most} (adapters); close one's client, or "
                "have the limit raised: mint keys set NAME --adapters N.",
                ROOM_SECONDS,
            )

    def room(self, owner: str, used_bytes: int) -> int | None:
        """Bytes of checkpoints that may still be saved, None for any number; `Limited` if there are none."""
        most = self._quota(owner).disk_bytes
        if most is None:
            return None
        if used_bytes >= most:
            self.refuse(
                owner,
                "disk_bytes",
                f"this key's checkpoints take {used_bytes:,} bytes and may take {most:,} (disk); delete some, or have "
                "the limit raised: mint keys set NAME --disk SIZE.",
                ROOM_SECONDS,
            )
        return most - used_bytes

    def refuse(self, owner: str, limit: str, message: str, seconds: float) -> None:
        self._audit.write_some("refused", owner, result="429", limit=limit)
        raise Limited(limit, message, seconds)

    def _refuse_rate(self, owner: str, limit: str, per_minute: int | None, wait: float) -> None:
        what = limit.partition("_")[0]
        self.refuse(
            owner,
            limit,
            f"this key may use {per_minute:,} {what} a minute ({limit}), and has used them; the next request is let in "
            f"in {math.ceil(wait)} s.",
            wait,
        )

    def _tenant(self, owner: str) -> _Tenant:
        if owner not in self._tenants:
            self._tenants[owner] = _Tenant()
        return self._tenants[owner]

    def _wait(self, owner: str, limit: str, per_minute: int | None, amount: float) -> float:
        with self._lock:
            bucket = self._tenant(owner).bucket(limit, per_minute)
            return 0.0 if bucket is None else bucket.wait(amount)

    def _take(self, owner: str, limit: str, per_minute: int | None, amount: float) -> None:
        with self._lock:
            bucket = self._tenant(owner).bucket(limit, per_minute)
            if bucket is not None:
                bucket.take(amount)


class Line:
    """The order of one model's requests under refusals: none is let in before one that was turned away and will come
    again, for then the model would wait for that one, give up on it, and carry it out too late."""

    PATIENCE = 120.0
    """Seconds after which who was turned away is not waited for any more; clients come again within 60."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: int | None = None
        self._refusal: Limited | None = None
        self._until = 0.0

    def admit(self, number: int | None, waiting: int | None, admit: Callable[[], None]) -> None:
        """`waiting`: the first number that has been let in and waits for those before it: they are let in whatever the
        limits say, or nothing would ever be done."""
        if number is not None and waiting is not None and number < waiting:
            return
        if number is None or self._first is None or self._clock() > self._until:
            self._first = None
        elif number > self._first:
            assert self._refusal is not None
            raise self._refusal
        try:
            admit()
        except Limited as refusal:
            if number is not None:
                self._first, self._refusal, self._until = number, refusal, self._clock() + self.PATIENCE
            raise
        if number == self._first:
            self._first = None
