"""Who sends much must be known first. A route's body is read before its key is looked at, so without this anybody could
have the server hold, or write to disk, as much as the largest request may have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mint.errors import MintError
from mint.server.routes import known_user

STRANGERS_BYTES = 16 << 10
"""A request without a key may have this much; more than the token exchange or a failed sign-in needs."""


class Gate:
    """ASGI middleware: asks for the key before it lets a large body, or one of unknown size, in."""

    def __init__(self, app: ASGIApp, answer: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(("/api/", "/v1/")) and _may_be_large(scope):
            request = Request(scope)
            try:
                await known_user(request)
            except MintError as error:
                refusal = await self._answer(request, error)
                refusal.headers["connection"] = "close"  # the body is not read
                return await refusal(scope, receive, send)
        await self._app(scope, receive, send)


def _may_be_large(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not declared.isdigit() or int(declared) > STRANGERS_BYTES
