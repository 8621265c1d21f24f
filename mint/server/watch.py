"""Every request on its way through: its id, its place in the log and in the figures.

The id is the client's own `X-Request-Id` if it sends a plain one, else drawn here; it is returned in that header and in
the body of every error, and is on the request's line in the log, so that a user's complaint finds its line.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mint.server.metrics import Traffic

HEADER = b"x-request-id"
_PLAIN = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
access = logging.getLogger("mint.access")

QUIET = (
    "/api/v1/healthz",
    "/health",
    "/healthz",
    "/readyz",
    "/metrics",
    "/api/v1/telemetry",
    "/api/v1/session_heartbeat",
)
"""Asked all day long by machines: logged only when they fail."""


class Watch:
    """ASGI middleware, around everything else."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self._app = app
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = next((value for name, value in scope["headers"] if name == HEADER), b"")
        request_id = sent if _PLAIN.fullmatch(sent) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        started, status = time.perf_counter(), 500

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER, request_id)]
            await send(message)

        self._traffic.under_way.inc()
        try:
            await self._app(scope, receive, told)
        finally:
            self._traffic.under_way.dec()
            self._note(scope, status, time.perf_counter() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route_of(scope)
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._traffic.requests.labels(method, route, str(status)).inc()
        self._traffic.seconds.labels(route).observe(seconds)
        if scope["path"] in QUIET and status < 400:
            return
        user = scope["state"].get("user")
        told = {
            "request_id": scope["state"]["request_id"],
            "key": None if user is None else user.name,
            "method": method,
            "route": route,
            # A link in the log would be a key to what it leads to.
            "path": route if "{token}" in route else scope["path"],
            "status": status,
            "ms": round(1000 * seconds, 1),
        }
        access.log(logging.ERROR if status >= 500 else logging.INFO, "request", extra={"fields": told})


def _route_of(scope: Scope) -> str:
    """The route as it was declared: a path with ids in it would be a metric each. Some releases of FastAPI leave out
    the prefix under which the route was included."""
    if (route := scope.get("route")) is None:
        return "unknown"
    missing = [p for p in ("/api/v1", "/v1") if scope["path"].startswith(f"{p}/") and not route.path.startswith(p)]
    return f"{''.join(missing)}{route.path}"


_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields a record brings along."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            told["error"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)


def log_as_json(level: int = logging.INFO) -> None:
    """Everything this process logs goes to standard error, a line of JSON each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.error", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
