"""HTTP to one server: one pool of connections, retries with back-off, errors by status.

Knows statuses, headers and keys; what is said over it is the business of the clients.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from mint.client.auth import TokenExchange
from mint.client.futures import LOOP_THREAD
from mint.client.http import (
    ANSWER_WITHIN,
    Lanes,
    Listener,
    NotConnected,
    Request,
    Response,
    Silent,
    Unreachable,
    connector,
    target,
)
from mint.errors import (
    BadRequest,
    Busy,
    ConnectionFailed,
    Forbidden,
    Internal,
    MintError,
    NotFound,
    TimedOut,
    Unauthorized,
)
from mint.version import __version__
from mint.wire import JSON

PATIENCE = 300.0
"""Seconds a call goes on trying while the server cannot be reached or has no room: long enough for a restart."""
FIRST_PATIENCE = 2.0
"""The same before the server has ever answered: a wrong address should be told at once."""
FAULT_RETRIES = 3
"""A 500 is most likely a fault that stays; a few tries, not five minutes of them."""

POSTS, POLLS = 32, 256
"""Connections for requests that are answered at once, and for those the server holds open until it has a result.
Both stay well below the 1024 open files that many systems allow a process."""
_BY_STATUS: dict[int, type[MintError]] = {
    401: Unauthorized,
    402: Forbidden,
    403: Forbidden,
    404: NotFound,
    408: TimedOut,
    410: NotFound,
    429: Busy,
}
_HOW_TO_TRUST = (
    " The server's certificate is not trusted here: set SSL_CERT_FILE to the certificate (PEM) of the authority that "
    "signed it."
)

logger = logging.getLogger("mint")
# httpx logs every request at INFO, where scripts keep their own progress; only those of our own thread are dropped.
logging.getLogger("httpx").addFilter(lambda r: r.threadName != LOOP_THREAD or r.levelno > logging.INFO)


class Backoff:
    """Growing waits between attempts, within a bound on the time from the first of them."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.attempts = 0
        self._deadline = math.inf

    async def wait(self, at_least: float = 0.0) -> bool:
        """Sleeps before the next attempt; False, without sleeping, when there is no time for one."""
        if self.attempts == 0:
            self._deadline = time.monotonic() + self.patience
        delay = max(at_least, min(5.0, 0.1 * 2**self.attempts) * random.uniform(0.7, 1.3))
        if time.monotonic() + delay > self._deadline:
            return False
        self.attempts += 1
        await asyncio.sleep(delay)
        return True


class Transport:
    """Sends requests to the server at `base_url`; lives on the background loop."""

    def __init__(self, base_url: str, api_key: str | None, diagnose: Callable[[], str | None] = lambda: None) -> None:
        """`diagnose` may know why the server is gone for good; then nobody waits for it to come back."""
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.exchange: TokenExchange | None = None
        self._diagnose = diagnose
        self._met = False
        self._told = -math.inf
        scheme = urlsplit(self.base_url)
        if scheme.scheme not in ("http", "https") or not scheme.hostname:
            raise BadRequest(f"base_url is {base_url!r}; expected an address such as http://127.0.0.1:8000.")
        self._prefix = f"{scheme.path}/api/v1/"
        self._agent = {"User-Agent": f"mint/{__version__}"}
        connect = connector(self.base_url)
        self._posts, self._polls = Lanes(POSTS, connect), Lanes(POLLS, connect)

    async def close(self) -> None:
        await asyncio.gather(self._posts.close(), self._polls.close())

    @property
    def may_hold(self) -> bool:
        """Whether a request may wait for its result on its own connection: others must not queue for want of one."""
        return self._polls.free > POLLS // 2

    async def post(self, path: str, body: Mapping[str, Any], **options: Any) -> Any:
        """A JSON request and its JSON answer, None if that is empty."""
        response = await self.send("POST", path, content=json.dumps(body).encode(), **options)
        return response.json() if response.content else None

    async def get(self, path: str, **options: Any) -> Any:
        return (await self.send("GET", path, **options)).json()

    async def poll(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        """One long poll: 2xx, 408 or 410, or the error of anything else. No answer in time counts as 408."""
        content = json.dumps(body).encode()
        return await self.send("POST", path, content=content, headers=headers, expected=(408, 410), held=True)

    async def send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        expected: tuple[int, ...] = (),
        held: bool = False,
        patience: float = PATIENCE,
        patience_when_full: float = PATIENCE,
        listener: Listener | None = None,
    ) -> Response:
        """The response if it is 2xx or `expected`; otherwise tries again while that may help, then raises.

        `held`: the server may keep the request open; the `listener` hears of an answer when it begins, which may be
        long before it ends, and again if it has to be asked for again. `patience_when_full` is for 429, `patience` for
        all other faults.
        """
        lanes = self._polls if held else self._posts
        limit = ANSWER_WITHIN if timeout is None else timeout
        address = target(self._prefix + path, params)
        named = self._agent | {"X-Idempotency-Key": uuid.uuid4().hex, "Content-Type": JSON} | dict(headers or {})
        backoff, backoff_when_full = self._backoff(patience), self._backoff(patience_when_full)
        renewed = False
        while True:
            cause: Exception | None = None
            try:
                await self._authorize(named)
                response = await lanes.request(Request(method, address, content, named, limit, listener))
            except Silent as error:
                if held:
                    return Response(408, {}, b"")
                cause = error
                failure: MintError = self._timed_out(path)
            except NotConnected as error:
                cause, failure = error, self._timed_out(path)
            except Unreachable as error:
                cause, failure = error, self._unreachable(error)
            else:
                self._met = True
                status = response.status_code
                if response.is_success or status in expected:
                    return response
                if status == 401 and self.exchange is not None and not renewed:
                    self.exchange.expire()
                    renewed = True
                    continue
                failure = error_of(response)
                if status == 429:
                    backoff = self._backoff(patience)
                    if _is_rate(response):  # a matter of time alone, and the server says of how much
                        backoff_when_full = self._backoff(patience_when_full)
                        self._say(f"{failure} Waiting for it.")
                    else:
                        self._tell(failure, backoff_when_full, at_once=True)
                    if await backoff_when_full.wait(_retry_after(response)):
                        continue
                if not _may_pass(status, backoff.attempts):
                    raise failure
            if (reason := self._diagnose()) is not None:
                raise ConnectionFailed(reason) from cause
            self._tell(failure, backoff)
            if not await backoff.wait():
                raise failure from cause

    def _backoff(self, patience: float) -> Backoff:
        return Backoff(patience if self._met else min(patience, FIRST_PATIENCE))

    async def _authorize(self, headers: dict[str, str]) -> None:
        key = self.api_key if self.exchange is None else await self.exchange.token(self._fetch_token)
        if key is not None:
            headers["X-API-Key"] = key

    def _tell(self, failure: MintError, backoff: Backoff, at_once: bool = False) -> None:
        """Says that something is being waited for that should not have to be."""
        if at_once or backoff.attempts >= 3:
            self._say(f"{failure} Trying again for up to {backoff.patience:.0f} s.")

    def _say(self, text: str) -> None:
        """Once a minute at most."""
        if time.monotonic() - self._told > 60:
            self._told = time.monotonic()
            logger.warning("%s", text)

    async def _fetch_token(self) -> str:
        headers = self._agent | {"X-API-Key": self.api_key or "", "Content-Type": JSON}
        response = await self._posts.request(Request("POST", f"{self._prefix}auth/token", b"{}", headers))
        if not response.is_success:
            raise error_of(response)
        return str(response.json()["jwt"])

    def _timed_out(self, path: str) -> TimedOut:
        return TimedOut(f"{self.base_url} did not answer {path} in time.")

    def _unreachable(self, error: Unreachable) -> ConnectionFailed:
        return ConnectionFailed(
            f"no connection to {self.base_url} ({error}). Is the server running, the "
            "address right? `mint serve` starts one; MINT_BASE_URL or base_url= says where it is; without either, a "
            "local one is started." + (_HOW_TO_TRUST if "CERTIFICATE_VERIFY_FAILED" in str(error) else "")
        )


def error_of(response: Response) -> MintError:
    """The error a status stands for, with the server's own words."""
    status = response.status_code
    try:
        body = response.json()
    except ValueError:
        body = response.text
    detail = body.get("detail", body.get("message", body)) if isinstance(body, dict) else body
    text = detail if isinstance(detail, str) else json.dumps(detail)
    text = text or f"the server answered {status} {response.reason_phrase} without a word"
    kind = _BY_STATUS.get(status) or (Internal if status >= 500 else BadRequest)
    return kind(text)


def _may_pass(status: int, attempts: int) -> bool:
    """Whether the same request may fare better later."""
    if status == 500:
        return attempts < FAULT_RETRIES
    return status == 408 or status > 500


def _is_rate(response: Response) -> bool:
    """Whether it was a limit on what may be sent a minute, or at once, that the request ran into."""
    return response.headers.get("x-mint-limit") in ("requests_per_minute", "tokens_per_minute", "concurrent")


def _retry_after(response: Response) -> float:
    """Seconds the server asks us to wait, at most a minute."""
    for header, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return min(60.0, max(0.0, float(response.headers[header]) * unit))
        except (KeyError, ValueError):
            continue
    return 0.0
