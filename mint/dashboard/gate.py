"""Who may look: a key is asked for where the server has keys, and exchanged for a cookie.

A key is compared by whoever owns the keys (`Site.owner_of`, constant in time); the cookie is 256 random bits that mean
something only to this process. Without keys only loopback is let in, under a loopback name, so that a page elsewhere
cannot reach the dashboard by pointing its own name at this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import secrets
import time
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mint.dashboard.site import HOUSE, SCOPE, Site, Viewer
from mint.errors import MintError

COOKIE = "mint_dashboard"
SESSION_SECONDS = 7 * 24 * 3600
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
WRONG_KEY_SECONDS = 0.5
"""What a wrong key costs its sender, so that guessing is slow."""
LONGEST_FORM = 4096
STATIC = Path(__file__).parent / "static"


@dataclass(frozen=True)
class _Session:
    expires: float
    key: str
    viewer: Viewer


class Gate:
    """Middleware in front of the dashboard's part of an application; everything else passes."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self.app = app
        self.site = site
        self._sessions: dict[bytes, _Session] = {}
        self._everybody: Viewer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._is_ours(scope["path"]):
            await self.app(scope, receive, send)
            return
        answer = await self._admit(scope, receive)
        if answer is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 4403})
        else:
            await answer(scope, receive, send)

    def _is_ours(self, path: str) -> bool:
        prefix = self.site.prefix
        return not prefix or path == prefix or path.startswith(f"{prefix}/")

    async def _admit(self, scope: Scope, receive: Receive) -> Response | None:
        """None: let it through."""
        headers = Headers(scope=scope)
        free = self._owner(None) is not None
        if refusal := self._refusal(headers, free):
            return PlainTextResponse(refusal, 403)
        if scope["path"] == self.site.prefix and self.site.prefix:
            return RedirectResponse(f"{self.site.prefix}/", 307)
        if free:
            self._everybody = self._everybody or self.site.viewer(_address(scope))
            scope[SCOPE] = self._everybody
            return None
        action = scope["path"].removeprefix(self.site.prefix)
        if action == "/login" and scope["type"] == "http":
            return await self._login(Request(scope, receive))
        session = self._session(headers)
        if session is None or self._owner(session[1].key) != session[1].viewer.owner:  # a key may be revoked
            goal = quote(f"{scope['path']}?{scope.get('query_string', b'').decode('latin-1')}".rstrip("?"))
            wants_page = "text/html" in headers.get("accept", "")
            to_login = RedirectResponse(f"{self.site.prefix}/login?then={goal}", 303)
            return to_login if wants_page else PlainTextResponse("sign in at the dashboard first", 401)
        token, kept = session
        if action == "/logout":
            self._sessions.pop(token, None)
            return RedirectResponse(f"{self.site.prefix}/login", 303)
        scope[SCOPE] = kept.viewer
        return None

    def _owner(self, key: str | None) -> str | None:
        """None for a key that is not let in."""
        if self.site.owner_of is None:
            return HOUSE
        try:
            return self.site.owner_of(key)
        except MintError:
            return None

    def _refusal(self, headers: Headers, free: bool) -> str | None:
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname or ""
        if free and name not in LOOPBACK:
            return (
                f"The dashboard was asked for under the name {name!r}. Without keys it answers only to 127.0.0.1 and "
                "localhost: set MINT_API_KEY to a secret of your choice before starting it, or forward the port.\n"
            )
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return f"A page of {origin} may not use this dashboard.\n"
        return None

    def _session(self, headers: Headers) -> tuple[bytes, _Session] | None:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return None
        if cookie is None:
            return None
        token = _digest(cookie.value)
        session = self._sessions.get(token)
        return (token, session) if session is not None and session.expires > time.time() else None

    async def _login(self, request: Request) -> Response:
        then = self._safe(request.query_params.get("then", ""))
        if request.method != "POST":
            return self._form(then)
        if int(request.headers.get("content-length", LONGEST_FORM + 1)) > LONGEST_FORM:
            return self._form(then, "That is longer than any key.", 400)
        key = parse_qs((await request.body()).decode(errors="replace")).get("key", [""])[0].strip()
        owner = self._owner(key)
        if owner is None:
            await asyncio.sleep(WRONG_KEY_SECONDS)
            return self._form(then, "The server does not know this key.", 401)
        self._forget_old()
        token = secrets.token_urlsafe(32)
        viewer = self.site.viewer(_address(request.scope), key, owner)
        self._sessions[_digest(token)] = _Session(time.time() + SESSION_SECONDS, key, viewer)
        answer = RedirectResponse(then, 303)
        secure = request.url.scheme == "https"
        path = self.site.prefix or "/"
        answer.set_cookie(COOKIE, token, SESSION_SECONDS, path=path, httponly=True, samesite="lax", secure=secure)
        return answer

    def _forget_old(self) -> None:
        now = time.time()
        self._sessions = {token: session for token, session in self._sessions.items() if session.expires > now}

    def _safe(self, then: str) -> str:
        """A page of ours, wherever the link came from."""
        own = then.startswith(f"{self.site.prefix}/") and not then.startswith("//") and "\\" not in then
        return then if own else f"{self.site.prefix}/"

    def _form(self, then: str, complaint: str = "", status: int = 200) -> Response:
        page = (STATIC / "login.html").read_text()
        style = (STATIC / "style.css").read_text()
        for name, text in {
            "STYLE": style,
            "THEN": html.escape(quote(then)),
            "COMPLAINT": html.escape(complaint),
        }.items():
            page = page.replace(f"{{{{{name}}}}}", text)
        return HTMLResponse(page, status, {"cache-control": "no-store"})


def _address(scope: Scope) -> str:
    """Where this application was reached, as the machine itself can reach it."""
    host, port = scope["server"]
    scheme = "https" if scope["scheme"] in ("https", "wss") else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
