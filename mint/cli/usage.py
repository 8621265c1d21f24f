"""`mint usage`: what each key and run used, from the data folder, or from a server for whoever has only a key."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mint.cli.moments import moment
from mint.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from mint.types import Usage

COUNTS = ("requests", "prompt_tokens", "sampled_tokens", "trained_tokens", "engine_seconds", "disk_bytes")


def usage(
    key: Annotated[str | None, typer.Option(help="Of this key, by name or id; all: of every key.")] = None,
    run: Annotated[str | None, typer.Option(help="Of this run.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="In the last 12h or 30d, or since a date such as 2027-01-31.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Data folder of the server.", show_default="that of MINT_BASE_URL, else MINT_HOME, ~/.mint"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show tokens, requests, engine time and disk by key and run.

    With --data, or where no MINT_BASE_URL is set, of all keys of a data folder; else of your own key on that server
    (an administrator's may ask for others')."""
    from mint.config import ClientConfig

    start = None if since is None else moment("since", since, ago=True)
    if data is None and ClientConfig.resolve().base_url is not None:
        lines = _from_server(key, run, start)
    else:
        lines = _from_folder(data, key, run, start)
    told = [asdict(line) for line in lines]
    if as_json:
        print_json(told)
    elif told:
        columns = ("key", "run", *(name.replace("_", " ") for name in COUNTS))
        print_table(columns, _rows(told), numbers=columns[2:])
    else:
        typer.echo("Nothing was used.")


def _from_server(key: str | None, run: str | None, since: float | None) -> list[Usage]:
    import mint

    with mint.ServiceClient() as service:
        return service.create_rest_client().get_usage(key, run, since).result().usage


def _from_folder(data: Path | None, key: str | None, run: str | None, since: float | None) -> list[Usage]:
    from mint.config import ServerConfig
    from mint.server.keyring import Keyring
    from mint.server.store import Store
    from mint.server.usage import report

    store = Store(ServerConfig.resolve(data=data).database_address)
    try:
        ring = Keyring(store)
        names = {row.id: row.name for row in ring.all()}
        owner = None if key in (None, "all") else key if key == "local" else ring.find(str(key)).id
        return report(store, lambda owner: names.get(owner, owner), owner, run, since)
    finally:
        store.close()


def _rows(lines: list[dict[str, Any]]) -> list[list[str]]:
    """One a run, and the sum of each key that has several."""
    rows = []
    for key in dict.fromkeys(line["key"] for line in lines):
        own = [line for line in lines if line["key"] == key]
        rows += [[key, line["run"] or "(none)", *(_number(line[name]) for name in COUNTS)] for line in own]
        if len(own) > 1:
            rows.append([key, "in all", *(_number(sum(line[name] for line in own)) for name in COUNTS)])
    return rows


def _number(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
