"""The exchange of an API key for a short-lived token, for servers that ask for one."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable

_MARGIN = 60.0
"""Seconds before its end at which a token is replaced."""
_ASSUMED_LIFE = 600.0
"""How long a token is used whose end cannot be read from it."""


class TokenExchange:
    """Keeps one token fresh."""

    def __init__(self) -> None:
        self._token = ""
        self._expires = 0.0
        self._lock = asyncio.Lock()

    async def token(self, fetch: Callable[[], Awaitable[str]]) -> str:
        async with self._lock:
            if time.time() > self._expires - _MARGIN:
                self._token = await fetch()
                self._expires = expiry(self._token) or time.time() + _ASSUMED_LIFE
            return self._token

    def expire(self) -> None:
        """The server refused the token: fetch another before the next request."""
        self._expires = 0.0


def expiry(token: str) -> float | None:
    """The `exp` claim of a JWT, unverified: it is the server that checks tokens."""
    try:
        payload = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["exp"])
    except (IndexError, KeyError, TypeError, ValueError):
        return None
