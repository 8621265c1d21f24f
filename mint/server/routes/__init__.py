"""The addresses: decode, call, encode. What is decided, is decided in the rooms behind."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import JSONResponse

from mint import wire
from mint.server.auth import User
from mint.server.futures import Promise
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


State = Annotated[Server, Depends(_server)]
Caller = Annotated[User, Depends(_caller)]


def envelope(promise: Promise) -> JSONResponse:
    """What every request that is answered later says at once."""
    return JSONResponse({"request_id": promise.request_id, **promise.envelope})


def answer(value: Any) -> JSONResponse:
    return JSONResponse(wire.to_json(value))
