"""The addresses: decode, call, encode. What is decided, is decided in the rooms behind."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mint import wire
from mint.errors import Forbidden, Unauthorized
from mint.server.audit import ADDRESS
from mint.server.auth import User
from mint.server.futures import Answer, Promise
from mint.server.state import Server


def key_of(request: Request) -> str | None:
    """Tinker clients send X-API-Key, OpenAI clients a bearer token."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else None)


def note_address(request: Request) -> None:
    """For the audit log."""
    ADDRESS.set(request.client.host if request.client else None)


async def _server(request: Request) -> Server:
    return request.app.state.server


State = Annotated[Server, Depends(_server)]


async def known_user(request: Request) -> User:
    server: Server = request.app.state.server
    note_address(request)
    try:
        user = request.state.user = server.keys.user(key_of(request))
    except Unauthorized:
        server.audit.write_some("sign_in_failed", None, result="401")
        raise
    return user


Uncounted = Annotated[User, Depends(known_user)]
"""Who asks for what no limit on requests counts, since clients send it by themselves as often as they have to; or for
what is let in and counted further inside, where it is known whether it was sent before."""


async def _caller(request: Request, user: Uncounted) -> User:
    request.app.state.server.meter.admit(user.name)
    return user


Caller = Annotated[User, Depends(_caller)]
"""Who asks for anything else."""


async def _administrator(user: Caller) -> User:
    if not user.admin:
        raise Forbidden("this is for administrators: the server's first key, or one made by mint keys create --admin.")
    return user


def sdk_release(version: str) -> float:
    """36 of 0.36.0: releases of the tinker SDK by their second number; what is none of them comes after all."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(minor) if major == "0" and minor.isdigit() else math.inf


Administrator = Annotated[User, Depends(_administrator)]


def envelope(promise: Promise) -> JSONResponse:
    """What every request that is answered later says at once."""
    return JSONResponse({"request_id": promise.request_id, **promise.envelope})


def delivery(result: Answer, request: Request, headers: dict[str, str] | None = None) -> Response:
    media_type, body = form(result, request)
    return Response(body, media_type=media_type, headers=headers)


def accepted(promise: Promise, request: Request, server: Server) -> Response:
    """The first answer to a request that is safe: its id at once, and where the client asked for that, the result as
    the rest of the same answer."""
    return Later(promise, request, server) if wire.HOLD in request.headers else envelope(promise)


class Later(Response):
    """Begins at once and ends with the result, in the form of `wire.LATER`."""

    def __init__(self, promise: Promise, request: Request, server: Server) -> None:
        super().__init__(media_type=wire.LATER, headers={wire.HELD: promise.request_id, **promise.head})
        del self.headers["content-length"]
        self._promise, self._request, self._server = promise, request, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        result, body = await self._server.futures.wait(self._promise), b""
        if result is not None:
            media_type, told = form(result, self._request)
            body = media_type.encode() + b"\n" + told
        await send({"type": "http.response.body", "body": body})


def form(result: Answer, request: Request) -> tuple[str, bytes]:
    """A result in the form it is kept in, where the client takes that, else in JSON."""
    if result.media_type in request.headers.get("accept", ""):
        return result.media_type, result.body
    return wire.JSON, result.as_json()


def answer(value: Any) -> JSONResponse:
    return JSONResponse(wire.to_json(value))
