"""What a server does and holds: queue, throughput, memory, tenants; models, training clients, checkpoints."""

from __future__ import annotations

import asyncio
import html
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from nicegui import ui

from mint.dashboard.frame import empty, markup, page, section, tiles_html
from mint.dashboard.serving import Refused, ServerDown, Serving
from mint.dashboard.site import Viewer
from mint.dashboard.theme import NOTHING, ago, duration, number, size
from mint.errors import MintError

REFRESH_SECONDS = 2.0


@dataclass(frozen=True)
class Overview:
    """What the viewer's key may see."""

    models: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[Any] = field(default_factory=list)
    figures: dict[str, Any] | None = None
    """What the server is doing, as `mint top` shows it; None where this key may not know or the server does not say."""


async def figures_of(serving: Serving) -> dict[str, Any] | None:
    try:
        figures: dict[str, Any] = await serving.get("api/v1/mint/status")
    except Refused as error:
        if error.answered in (403, 404):
            return None
        raise
    return figures


async def overview(serving: Serving) -> Overview:
    models, runs, checkpoints, sessions, figures = await asyncio.gather(
        serving.get("api/v1/get_server_capabilities"),
        serving.get("api/v1/training_runs", limit=200),
        serving.get("api/v1/checkpoints", limit=200),
        serving.get("api/v1/sessions", limit=200),
        figures_of(serving),
    )
    return Overview(
        models["supported_models"],
        runs["training_runs"],
        checkpoints["checkpoints"],
        sessions.get("sessions", []),
        figures,
    )


def doing(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A server's figures as tiles."""
    queue, rate, engine = figures["queue"], figures["tokens_per_second"], figures["engine"]
    adapters, memory = figures["adapters"], figures["memory"]
    running, waiting = engine.get("samples_running", 0), engine.get("samples_waiting", 0)
    used, blocks = engine.get("kv_blocks_used", 0), engine.get("kv_blocks_total", 0)
    kept = ", ".join(f"{there['count']} {tier}" for tier, there in adapters.items())
    why = figures["not_ready_because"] or queue["queue_state_reason"] or "takes requests"
    return [
        ("State", "ready" if figures["ready"] else "not ready", html.escape(why)),
        ("Queue", number(queue["requests"]), f"requests, and {number(queue['samples'])} samples"),
        ("Tokens a second", number(rate["sampled"]), f"sampled, {number(rate['trained'])} trained on"),
        ("Sampling", number(running), f"sequences, {number(waiting)} wait"),
        ("Cache", f"{100 * used / blocks:.0f} %" if blocks else NOTHING, f"of {number(blocks)} blocks"),
        ("Adapters", number(sum(there["count"] for there in adapters.values())), kept),
        (
            "Memory",
            size(memory["engine_bytes"]),
            f"engine, {size(memory['free_bytes'])} free",
        ),
        ("Up", duration(figures["uptime_seconds"]), f"{number(engine['restarts'])} restarts of the engine"),
    ]


def moment(text: str | None) -> str:
    if not text:
        return NOTHING
    when = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return ago((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


class ServerPage:
    def __init__(self, viewer: Viewer) -> None:
        self.serving = viewer.serving
        self.seen: object = None

    def build(self) -> None:
        self.tiles = markup("").classes("card")
        self.tiles.set_visibility(False)
        self.box = ui.element("div").style("display: flex; flex-direction: column; gap: 12px")
        with self.box:
            ui.label("Asking the server…").classes("muted")
        ui.timer(REFRESH_SECONDS, self._refresh)
        ui.timer(0, self._refresh, once=True)

    async def _refresh(self) -> None:
        try:
            found: object = await overview(self.serving)
        except ServerDown as error:
            found = error
        except MintError as error:
            found = error
        figures = found.figures if isinstance(found, Overview) else None
        self.tiles.set_visibility(figures is not None)
        if isinstance(found, Overview) and figures is not None:  # these change all the time, what is below does not
            self.tiles.set_content(tiles_html(doing(figures)))
            found = replace(found, figures={"tenants": figures["tenants"]})
        if repr(found) == repr(self.seen):
            return
        self.seen = found
        self.box.clear()
        with self.box:
            if isinstance(found, Overview):
                self._show(found)
            elif isinstance(found, ServerDown):
                empty("No server answers", [str(found)], "mint serve\nmint dashboard --server http://127.0.0.1:8000")
            else:
                empty("The server refused", [str(found)])

    def _show(self, found: Overview) -> None:
        if found.figures is not None:
            self._tenants(found.figures["tenants"])
        stored = sum(line.get("size_bytes") or 0 for line in found.checkpoints)
        figures = (
            ("Models", len(found.models), "ready or loaded on first use"),
            ("Training clients", len(found.runs), "adapters this key made"),
            ("Checkpoints", len(found.checkpoints), size(stored)),
            ("Sessions", len(found.sessions), "clients seen so far"),
        )
        markup(tiles_html([(name, number(value), more) for name, value, more in figures])).classes("card")
        section("Models")
        _table(
            ["Model", "Longest text"],
            [[m["model_name"], number(m.get("max_context_length"))] for m in found.models],
            "No model is loaded; the first request for one loads it.",
        )
        section("Training clients")
        _table(
            ["Adapter", "Base model", "Rank", "Owner", "Last checkpoint", "Last used"],
            [
                [
                    run["training_run_id"],
                    run["base_model"],
                    number(run.get("lora_rank")),
                    run["model_owner"],
                    (run.get("last_checkpoint") or {}).get("checkpoint_id", NOTHING),
                    moment(run["last_request_time"]),
                ]
                for run in found.runs
            ],
            "Nobody has trained here yet.",
        )
        section("Checkpoints")
        _table(
            ["Path", "Size", "Public", "Expires", "Saved"],
            [
                [
                    line["tinker_path"],
                    size(line.get("size_bytes")),
                    "yes" if line.get("public") else "no",
                    (line.get("expires_at") or "never")[:16].replace("T", " "),
                    moment(line.get("time")),
                ]
                for line in found.checkpoints[:100]
            ],
            "Nothing is saved.",
        )

    def _tenants(self, tenants: list[dict[str, Any]]) -> None:
        section("Tenants")
        _table(
            ["Tenant", "Sessions", "Adapters", "Requests under way", "Samples under way"],
            [
                [one["name"], *(number(one[name]) for name in ("sessions", "models", "requests", "samples"))]
                for one in tenants
            ],
            "Nobody is connected.",
        )


def _table(heads: list[str], lines: list[list[str]], otherwise: str) -> None:
    with ui.element("div").classes("card").style("padding: 4px 6px"):
        if not lines:
            ui.label(otherwise).classes("muted").style("padding: 10px 12px")
            return
        columns = [{"name": head, "label": head, "field": head, "align": "left", "sortable": True} for head in heads]
        rows = [dict(zip(heads, line, strict=True)) | {"key": i} for i, line in enumerate(lines)]
        table = ui.table(columns=columns, rows=rows, row_key="key", pagination=15).style("width: 100%")
        table.props("flat dense" + (" hide-pagination" if len(rows) <= 15 else ""))


@ui.page("/server")
def server_page(request: Request) -> None:
    with page(request, "Server", "Server") as viewer:
        address = html.escape(viewer.serving.address or "")
        markup(f'<div class="crumbs"><h1>Server</h1><span class="muted mono">{address}</span></div>')
        ServerPage(viewer).build()
