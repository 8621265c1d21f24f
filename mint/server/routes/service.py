"""Configuration, capabilities, sessions and heartbeats."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from mint.arguments import HONOURED, REFUSED
from mint.checks import LOSS_FNS
from mint.server import requests
from mint.server.catalogue import sizes
from mint.server.routes import Caller, State, Uncounted, answer, key_of, sdk_release
from mint.types import GetServerCapabilitiesResponse, SupportedModel

router = APIRouter()


@router.post("/client/config")
async def client_config(body: requests.ClientConfigBody, request: Request, user: Uncounted) -> dict[str, Any]:
    """Switches of the official client; whatever is not said keeps the client's default."""
    ours = {"sample_batches": True} if request.headers.get("user-agent", "").startswith("mint/") else {}
    return ours | {
        # Clients with an sk- key can only start by exchanging it for a token; others need no such detour.
        "pjwt_auth_enabled": (key_of(request) or "").startswith("sk-"),
        "parallel_fwdbwd_chunks": True,
        # That transport follows redirects whatever it is told, and the archive link of older clients is a redirect.
        "use_pyqwest_transport": sdk_release(body.sdk_version or "") >= 36,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(body: requests.ClientConfigBody, user: Uncounted) -> dict[str, Any]:
    return {"sample_cancel_enabled": True}


@router.post("/auth/token")
async def auth_token(request: Request, server: State, user: Uncounted) -> dict[str, str]:
    return {"jwt": server.keys.token(key_of(request), user, server.limits.token_seconds)}


@router.get("/get_server_capabilities")
async def capabilities(server: State, user: Caller) -> Response:
    catalogue = server.catalogue
    models = [SupportedModel(name, sizes(catalogue.known(name))[1]) for name in catalogue.names()]
    losses: dict[str, dict[str, float | str]] = {name: dict(menu.options) for name, menu in LOSS_FNS.items()}
    return answer(GetServerCapabilitiesResponse(models, losses, HONOURED, REFUSED))


@router.post("/create_session")
async def create_session(body: requests.CreateSession, server: State, user: Caller) -> dict[str, str]:
    session = server.sessions.create(
        user, body.tags, body.user_metadata or {}, body.sdk_version, body.display_name, body.project_id
    )
    return {"session_id": session.id, "type": "create_session"}


@router.post("/session_heartbeat")
async def heartbeat(body: requests.Heartbeat, server: State, user: Uncounted) -> dict[str, str]:
    server.sessions.touch(body.session_id, user)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, body: requests.FinishSession, server: State, user: Uncounted) -> Response:
    server.sessions.finish(session_id, user, body.reason.type)
    return Response(status_code=204)


@router.post("/telemetry")
async def telemetry(request: Request, user: Uncounted) -> dict[str, str]:
    """Taken and thrown away: clients that are refused log an error every second."""
    await request.body()
    return {"status": "accepted"}
