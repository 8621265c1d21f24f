"""For whoever watches the server: does it live, can it work, what is it doing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from mint.server.routes import Administrator, State

router = APIRouter()
root = APIRouter()


@root.get("/health")
@root.get("/healthz")
@router.get("/healthz")
async def health() -> dict[str, str]:
    """The process lives and answers."""
    return {"status": "ok"}


@root.get("/readyz")
async def ready(server: State) -> Response:
    """The engine is up, the database can be written, there is room on the disk; else 503 with the reason."""
    ready, reason = await server.status.readiness()
    if ready:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready", "reason": reason}, 503, {"retry-after": "5"})


@root.get("/metrics")
async def metrics(server: State, user: Administrator) -> Response:
    """For Prometheus."""
    return Response(await server.status.exposition(), media_type=CONTENT_TYPE_LATEST)


@router.get("/mint/status")
async def status(server: State, user: Administrator) -> dict[str, Any]:
    """The same figures as JSON, for `mint top` and the dashboard."""
    return await server.status.figures()
