"""Who is let in, and whose runs they see."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from mint.config import ClientConfig
from mint.dashboard.gate import COOKIE, Gate
from mint.dashboard.site import HOUSE, SCOPE, Site
from mint.errors import Unauthorized
from tests.dashboard.folders import write_run

KEYS: dict[str | None, str] = {"first": HOUSE, "second": "key-2"}


def owner_of(key: str | None) -> str:
    if key not in KEYS:
        raise Unauthorized("no such key")
    return KEYS[key]


async def seen(request: Request) -> JSONResponse:
    viewer = request.scope.get(SCOPE)
    config = viewer.serving.config if viewer else ClientConfig()
    return JSONResponse(
        {"owner": viewer.owner, "runs": viewer.library.names(), "key": config.api_key, "address": config.base_url}
        if viewer
        else {}
    )


def client(tmp_path: Path, keys: bool = True, **more: Any) -> TestClient:
    write_run(tmp_path / "one")
    write_run(tmp_path / "key-2" / "two")
    app = Starlette(routes=[Route("/api", seen), Route("/dashboard/{path:path}", seen, methods=["GET", "POST"])])
    app.add_middleware(Gate, site=Site(tmp_path, server=None, owner_of=owner_of if keys else None, prefix="/dashboard"))
    return TestClient(app, base_url="http://localhost:8000", follow_redirects=False, **more)


def sign_in(asked: TestClient, key: str) -> httpx.Response:
    return asked.post("/dashboard/login?then=/dashboard/run/one", data={"key": key})


def test_a_page_leads_to_the_form_and_anything_else_is_refused(tmp_path: Path) -> None:
    asked = client(tmp_path)
    to_form = asked.get("/dashboard/run/one?step=3", headers={"accept": "text/html"})
    assert to_form.status_code == 303
    assert to_form.headers["location"] == "/dashboard/login?then=/dashboard/run/one%3Fstep%3D3"
    assert asked.get("/dashboard/assets/x.js").status_code == 401
    assert asked.get("/api").json() == {}  # not ours


def test_a_key_is_exchanged_for_a_cookie_that_says_nothing(tmp_path: Path) -> None:
    asked = client(tmp_path)
    answer = sign_in(asked, "first")
    assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard/run/one")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and "Path=/dashboard" in cookie and "first" not in cookie
    assert asked.get("/dashboard/").json()["owner"] == HOUSE


def test_a_wrong_key_and_an_invented_cookie_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mint.dashboard.gate.WRONG_KEY_SECONDS", 0.0)
    asked = client(tmp_path)
    answer = sign_in(asked, "wrong")
    assert answer.status_code == 401 and "does not know this key" in answer.text and "set-cookie" not in answer.headers
    asked.cookies.set(COOKIE, "x" * 43, domain="localhost")
    assert asked.get("/dashboard/").status_code == 401
    assert sign_in(asked, "x" * 5000).status_code == 400


def test_a_tenant_sees_only_its_own_folder_and_asks_with_its_own_key(tmp_path: Path) -> None:
    asked = client(tmp_path)
    sign_in(asked, "second")
    told = asked.get("/dashboard/").json()
    assert told["owner"] == "key-2" and told["runs"] == ["two"] and told["key"] == "second"
    house = client(tmp_path)
    sign_in(house, "first")
    assert house.get("/dashboard/").json()["runs"] == ["key-2/two", "one"]


def test_signing_out_ends_the_session(tmp_path: Path) -> None:
    asked = client(tmp_path)
    sign_in(asked, "first")
    assert asked.get("/dashboard/logout").status_code == 303
    assert asked.get("/dashboard/").status_code == 401


def test_a_revoked_key_is_shut_out_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = client(tmp_path)
    sign_in(asked, "second")
    assert asked.get("/dashboard/").status_code == 200
    monkeypatch.delitem(KEYS, "second")
    assert asked.get("/dashboard/").status_code == 401


def test_a_server_that_gets_its_first_key_asks_for_it_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = client(tmp_path)
    monkeypatch.setitem(KEYS, None, HOUSE)  # no key is needed
    assert asked.get("/dashboard/").json()["owner"] == HOUSE
    monkeypatch.delitem(KEYS, None)
    assert asked.get("/dashboard/").status_code == 401


def test_the_form_sends_nobody_elsewhere(tmp_path: Path) -> None:
    asked = client(tmp_path)
    for goal in ("https://evil.example/", "//evil.example", "/elsewhere", "/dashboard/\\evil"):
        answer = asked.post("/dashboard/login", params={"then": goal}, data={"key": "first"})
        assert answer.headers["location"] == "/dashboard/"
    form = asked.get("/dashboard/login", params={"then": '/dashboard/"><script>'})
    assert "<script>alert" not in form.text and '"><script>' not in form.text


def test_without_keys_only_loopback_names_are_answered(tmp_path: Path) -> None:
    asked = client(tmp_path, keys=False)
    assert asked.get("/dashboard/").json()["owner"] == HOUSE
    answer = asked.get("/dashboard/", headers={"host": "evil.example"})
    assert answer.status_code == 403 and "MINT_API_KEY" in answer.text
    assert asked.get("/dashboard").headers["location"] == "/dashboard/"


def test_a_page_of_another_origin_is_refused_also_as_a_websocket(tmp_path: Path) -> None:
    asked = client(tmp_path, keys=False)
    assert asked.get("/dashboard/", headers={"origin": "http://evil.example"}).status_code == 403
    assert asked.get("/dashboard/", headers={"origin": "http://localhost:8000"}).status_code == 200
    with (
        pytest.raises(WebSocketDisconnect) as refused,
        asked.websocket_connect("/dashboard/ws", headers={"origin": "http://evil.example"}),
    ):
        pass
    assert refused.value.code == 4403


def test_the_server_asked_is_the_one_the_dashboard_is_part_of(tmp_path: Path) -> None:
    asked = client(tmp_path, keys=False)
    assert asked.get("/dashboard/").json()["address"] == "http://localhost:8000"
