"""The application: lifespan, routers, and the one place where an error becomes a status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException

from mint.backend import Backend
from mint.config import ServerConfig
from mint.errors import Busy, MintError
from mint.server.bodies import BodyLimit
from mint.server.gate import Gate
from mint.server.limits import Limits
from mint.server.metrics import Traffic
from mint.server.quotas import Limited
from mint.server.room import is_full, when_there_is_room
from mint.server.routes import futures, health, mint_extras, openai, rest, sample_batches, sampling, service, training
from mint.server.shortcuts import Shortcuts
from mint.server.shutout import keep_out
from mint.server.state import Server
from mint.server.watch import Watch
from mint.version import __version__

log = logging.getLogger("mint.server")


def create_app(config: ServerConfig, backend: Backend, limits: Limits | None = None) -> FastAPI:
    """The HTTP server over a backend, which stays the caller's to close."""
    limits, traffic = limits or Limits(), Traffic()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server = app.state.server = when_there_is_room(lambda: Server(config, backend, limits, traffic))
        await server.start()
        chores = [asyncio.create_task(chore) for chore in (server.keep_house(), keep_out(server))]
        yield
        for chore in chores:
            chore.cancel()
        server.close()

    app = FastAPI(title="MinT", version=__version__, lifespan=lifespan, redirect_slashes=False)
    app.add_middleware(Shortcuts, answer_error=answer_error)
    app.add_middleware(Gate, answer=answer_error)
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(Watch, traffic=traffic)  # the last one added is the outermost
    for routes in (service, futures, training, sampling, sample_batches, rest, mint_extras, health):
        app.include_router(routes.router, prefix="/api/v1")
    app.include_router(health.root)
    app.include_router(openai.router, prefix="/v1")
    for kind in (MintError, RequestValidationError, HTTPException, OSError, OperationalError, Exception):
        app.add_exception_handler(kind, answer_error)
    return app


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    status, text = _status_and_text(error)
    text = text.encode(errors="replace").decode()  # it may quote what the client sent
    if isinstance(error, RequestValidationError):
        _spend_number(request, error.body)
    headers: dict[str, str] = {}
    body: dict[str, object] = {"detail": text, "request_id": request.state.request_id}
    if status == 429:
        busy = error if isinstance(error, Busy) else Busy()
        body |= {"queue_state": busy.queue_state, "queue_state_reason": text}
        headers["retry-after"] = f"{math.ceil(busy.retry_after)}"
    if status == 503:
        headers["retry-after"] = "1"
    if isinstance(error, Limited):
        headers["x-mint-limit"] = error.limit
    if request.url.path.startswith("/v1/"):
        body = openai.error_body(status, text)
    return JSONResponse(body, status, headers)


def _status_and_text(error: Exception) -> tuple[int, str]:
    match error:
        case MintError():
            return error.status, str(error)
        case RequestValidationError():
            return 400, " ".join(_sentence(fault) for fault in error.errors())
        case HTTPException():
            return error.status_code, str(error.detail)
    if is_full(error):
        why = error.orig if isinstance(error, OperationalError) else error
        return 429, f"the server's disk is full ({why}); make room, then send the request again."
    if isinstance(error, OperationalError):
        log.error("the database failed: %s", error.orig)
        return 503, "the server's database cannot be used at present (its log says why); send the request again later."
    log.error("a request failed", exc_info=error)
    return 500, f"the server failed: {type(error).__name__}: {error}"


def _sentence(fault: dict) -> str:
    where = ".".join(str(part) for part in fault["loc"] if part != "body") or "the body"
    if fault["type"] == "extra_forbidden":
        return f"unknown field {where!r}."
    if fault["type"] == "missing":
        return f"{where!r} is missing."
    return f"{where}: {fault['msg']} (got {repr(fault.get('input'))[:100]})."


def _spend_number(request: Request, body: object) -> None:
    """A training request that cannot be read still uses up its sequence number."""
    if isinstance(body, dict) and hasattr(request.state, "user"):
        model_id, seq_id = body.get("model_id"), body.get("seq_id")
        if isinstance(model_id, str) and type(seq_id) is int:
            request.app.state.server.models.refuse(model_id, seq_id, request.state.user)
