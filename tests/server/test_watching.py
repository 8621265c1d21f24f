"""Whoever watches a server: health, readiness, figures, request ids and log lines."""

import json
import logging
import re
from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from mint.cli.__main__ import app
from mint.errors import Interrupted
from mint.server.watch import JsonLines
from tests.server.live import Live, train_body
from tests.waiting import eventually

Serve = Callable[..., Live]


def figures_of(live: Live) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample on the metrics page, read by Prometheus's own parser."""
    page = live.http.get(f"{live.url}/metrics")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(page.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_requests_are_counted_by_route_and_status_and_queues_show_what_waits(live: Live) -> None:
    model = live.model()
    live.refused("/get_info", {"model_id": "none"}, 404)
    live.backend.hold()
    live.train(model, 1)
    found = figures_of(live)
    route = (("method", "POST"), ("route", "/api/v1/get_info"), ("status", "404"))
    assert found["mint_requests_total", route] == 1
    assert found["mint_queue_requests", ()] == 1 and found["mint_queue_bytes", ()] > 0
    assert found["mint_journal_flush_seconds_count", ()] >= 1
    assert found["mint_tenant_sessions", (("tenant", "local"),)] == 1
    live.backend.let_go()
    live.fetch(live.step(model, 2))
    assert figures_of(live)["mint_queue_requests", ()] == 0


def test_the_figures_are_for_administrators_where_there_are_keys(serve: Serve) -> None:
    live = serve(keys=("tml-admin", "tml-other"))
    for path in ("/metrics", "/api/v1/mint/status"):
        assert httpx.get(live.url + path).status_code == 401
        assert httpx.get(live.url + path, headers={"X-API-Key": "tml-other"}).status_code == 403
        assert httpx.get(live.url + path, headers={"X-API-Key": "tml-admin"}).status_code == 200


def test_ready_means_engine_database_and_disk_and_the_reason_is_told(serve: Serve, monkeypatch) -> None:
    live = serve()
    assert httpx.get(f"{live.url}/readyz").json() == {"status": "ready"}
    monkeypatch.setattr("mint.machine.free_disk", lambda folder: 5 << 20)
    answer = httpx.get(f"{live.url}/readyz")
    assert answer.status_code == 503 and "5 MiB are free" in answer.json()["reason"]
    assert httpx.get(f"{live.url}/healthz").json() == {"status": "ok"}  # it lives all the same


def test_a_silent_engine_is_not_ready_and_the_page_does_not_hang(serve: Serve, monkeypatch) -> None:
    monkeypatch.setattr("mint.server.metrics.ENGINE_PATIENCE", 0.05)
    monkeypatch.setattr("mint.server.metrics.ENGINE_SILENCE", 0.1)
    monkeypatch.setattr("mint.server.metrics.ENGINE_SECONDS", 0.0)
    live = serve(sweep_seconds=3600)
    live.backend.fail["stats"] = Interrupted("gone")
    # What it told last counts for a moment.
    answer = eventually(lambda: (told := httpx.get(f"{live.url}/readyz")).is_error and told)
    assert "the engine does not answer" in answer.json()["reason"]


def test_every_answer_has_a_request_id_and_errors_repeat_it(live: Live) -> None:
    answer = live.http.get("/sessions/none", headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" == answer.json()["request_id"]
    odd = live.http.get("/sessions/none", headers={"X-Request-Id": 'a"b'})
    assert re.fullmatch("[0-9a-f]{32}", odd.headers["x-request-id"])


def test_log_lines_are_json_with_id_key_route_status_and_time(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    def logged() -> list[dict]:
        return [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == "mint.access"]

    with caplog.at_level(logging.INFO, "mint.access"):
        live.http.get("/healthz")
        live.http.get("/sessions/none", headers={"X-Request-Id": "mine-2"})
        (line,) = eventually(lambda: [line for line in logged() if line["request_id"] == "mine-2"])
    assert line | {"time": "", "ms": 0} == {
        "time": "",
        "level": "info",
        "logger": "mint.access",
        "message": "request",
        "request_id": "mine-2",
        "key": "local",
        "method": "GET",
        "route": "/api/v1/sessions/{session_id}",
        "path": "/api/v1/sessions/none",
        "status": 404,
        "ms": 0,
    }
    assert not any(line["path"] == "/api/v1/healthz" for line in logged())


def test_mint_top_shows_the_figures_once_and_as_json(live: Live) -> None:
    model = live.model()
    told = CliRunner().invoke(app, ["top", "--url", live.url, "--once"], env={"COLUMNS": "200"})
    assert told.exit_code == 0 and "ready" in told.output and model in told.output
    told = CliRunner().invoke(app, ["top", "--url", live.url, "--json"])
    figures = json.loads(told.output)
    assert figures["models"][0]["model_id"] == model and figures["queue"]["requests"] == 0
    assert figures["memory"]["server_bytes"] > 1 << 20


def test_mint_top_says_what_is_wrong(live: Live) -> None:
    told = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9", "--once"])
    assert told.exit_code == 4 and "no answer from http://127.0.0.1:9" in told.output


def test_figures_are_one_page_however_many_ids_were_asked_for(live: Live) -> None:
    for n in range(5):
        live.http.get(f"/sessions/{n}")
        live.http.get(f"{live.url}/nowhere/{n}")
        live.http.post("/forward_backward", json=train_body(f"m{n}", 1))
    routes = {labels for name, labels in figures_of(live) if name == "mint_requests_total"}
    assert len(routes) <= 4


def test_no_download_link_is_in_the_log(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    model = live.model()
    live.save(model, 1)
    asked = live.http.get(f"/training_runs/{model}/checkpoints/weights/one/archive")

    def downloads() -> set[str]:
        lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == "mint.access"]
        return {line["path"] for line in lines if line["path"].startswith("/api/v1/downloads/")}

    with caplog.at_level(logging.INFO, "mint.access"):
        assert live.http.get(asked.headers["location"]).status_code == 200
        found = eventually(downloads)  # the line of a request may come after its answer
    assert found == {"/api/v1/downloads/{token}/checkpoint.tar.gz"}
