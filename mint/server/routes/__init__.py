"""The addresses: decode, call, encode. What is decided, is decided in the rooms behind."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse

from mint import wire
from mint.server.auth import User
from mint.server.futures import Answer, Promise
from mint.server.state import Server


def key_of(request: Request) -> str | None:
    """Tinker clients send X-API-Key, OpenAI clients a bearer token."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else None)


async def _server(request: Request) -> Server:
    return request.app.state.server


async def _caller(request: Request) -> User:
    request.state.user = request.app.state.server.keys.user(key_of(request))
    return request.state.user


def sdk_release(version: str) -> float:
    """36 of 0.36.0: releases of the tinker SDK by their second number; what is none of them comes after all."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(minor) if major == "0" and minor.isdigit() else math.inf


State = Annotated[Server, Depends(_server)]
Caller = Annotated[User, Depends(_caller)]


def envelope(promise: Promise) -> JSONResponse:
    """What every request that is answered later says at once."""
    return JSONResponse({"request_id": promise.request_id, **promise.envelope})


def delivery(result: Answer, request: Request, headers: dict[str, str] | None = None) -> Response:
    """A result in the form it is kept in, where the client takes that, else in JSON."""
    if result.media_type in request.headers.get("accept", ""):
        return Response(result.body, media_type=result.media_type, headers=headers)
    return Response(result.as_json(), media_type=wire.JSON, headers=headers)


def answer(value: Any) -> JSONResponse:
    return JSONResponse(wire.to_json(value))
