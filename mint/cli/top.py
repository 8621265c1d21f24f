"""`mint top`: what a server is doing, live."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mint.cli.failures import Code, Failure
from mint.config import ClientConfig

if TYPE_CHECKING:
    import httpx
    from rich.console import Group
    from rich.table import Table

LOCAL = "http://127.0.0.1:8000"
MODELS_SHOWN = 15


def top(
    url: Annotated[
        str | None, typer.Option(help="Address of the server.", show_default=f"MINT_BASE_URL or {LOCAL}")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key of an administrator.", show_default="MINT_API_KEY")] = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one look as JSON and end.")] = False,
) -> None:
    """Show a server's queue, tokens a second, adapters, memory and tenants, live."""
    import httpx
    from rich.console import Console
    from rich.live import Live

    config = ClientConfig.resolve(url, key)
    address = (config.base_url or LOCAL).rstrip("/")
    headers = {} if config.api_key is None else {"X-API-Key": config.api_key}
    with httpx.Client(base_url=address, headers=headers, timeout=15) as client:
        figures = _look(client, address)
        if as_json:
            typer.echo(json.dumps(figures, indent=2))
            return
        if once:
            Console().print(render(address, figures))
            return
        with Live(render(address, figures), screen=True, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(interval)
                    live.update(render(address, _look(client, address)), refresh=True)
            except KeyboardInterrupt:
                return


def _look(client: httpx.Client, address: str) -> dict[str, Any]:
    import httpx

    try:
        answer = client.get("/api/v1/mint/status")
    except httpx.HTTPError as error:
        told = f"no answer from {address} ({error})."
        raise Failure(told, "--url or MINT_BASE_URL says where the server is.", Code.UNREACHABLE) from error
    if not answer.is_success:
        told = f"{address} answered {answer.status_code}: {answer.text}"
        raise Failure(told, "The figures need an administrator's key: --key or MINT_API_KEY.", Code.REFUSED)
    return answer.json()


def render(address: str, figures: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.text import Text

    state = "ready" if figures["ready"] else f"NOT READY: {figures['not_ready_because']}"
    head = Text(f"MinT {figures['version']} at {address}, up {_span(figures['uptime_seconds'])}, {state}", style="bold")
    tenants = _table("tenant", "sessions", "models", "requests", "samples")
    for tenant in figures["tenants"]:
        _add(tenants, tenant["name"], *(str(tenant[n]) for n in ("sessions", "models", "requests", "samples")))
    models = _table("model", "base", "rank", "idle")
    for model in sorted(figures["models"], key=lambda model: model["idle_seconds"])[:MODELS_SHOWN]:
        _add(models, model["model_id"], model["base_model"], str(model["rank"]), _span(model["idle_seconds"]))
    return Group(head, _facts(figures), tenants, models)


def _facts(figures: dict[str, Any]) -> Table:
    engine, queue, rate = figures["engine"], figures["queue"], figures["tokens_per_second"]
    facts = _table("", "")
    _add(
        facts,
        "queue",
        f"{queue['requests']} requests, {queue['samples']} samples, {_size(queue['bytes'])}; "
        f"{queue['results']} results kept; {queue['queue_state_reason'] or queue['queue_state']}",
    )
    _add(facts, "tokens/s", f"{rate['sampled']:,.0f} sampled, {rate['trained']:,.0f} trained")
    _add(
        facts,
        "sampler",
        f"{engine.get('samples_running', 0):.0f} running, {engine.get('samples_waiting', 0):.0f} waiting, "
        f"{engine.get('kv_blocks_used', 0):,.0f} of {engine.get('kv_blocks_total', 0):,.0f} cache blocks",
    )
    _add(
        facts,
        "adapters",
        ", ".join(f"{there['count']} {tier} ({_size(there['bytes'])})" for tier, there in figures["adapters"].items())
        + f"; {engine.get('adapters_waiting', 0):.0f} waiting for a place",
    )
    _add(facts, "memory", ", ".join(f"{n.removesuffix('_bytes')} {_size(b)}" for n, b in figures["memory"].items()))
    _add(facts, "disk free", _size(figures["disk_free_bytes"]))
    _add(facts, "engine restarts", str(engine["restarts"]))
    return facts


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=any(columns), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    """As it is: names that users chose must not be read as markup, nor `:train:` as a picture."""
    from rich.text import Text

    table.add_row(*map(Text, cells))


def _size(amount: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def _span(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
