"""`mint keys`: who may use the servers of a data folder. Running servers notice changes within two seconds."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mint.cli.moments import moment
from mint.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from mint.server.audit import Audit
    from mint.server.keyring import Keyring
    from mint.server.tenant_rows import KeyRow

keys = typer.Typer(help="Make, list, change and revoke API keys.", no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(help="Name of the key, or its id.")]
Data = Annotated[Path | None, typer.Option(help="Data folder of the server.", show_default="MINT_HOME or ~/.mint")]
Requests = Annotated[str | None, typer.Option("--requests-per-minute", metavar="N", help="Requests a minute.")]
Tokens = Annotated[
    str | None, typer.Option("--tokens-per-minute", metavar="N", help="Tokens read, sampled and trained a minute.")
]
Concurrent = Annotated[str | None, typer.Option(metavar="N", help="Requests under way at once.")]
Adapters = Annotated[str | None, typer.Option(metavar="N", help="Training models at once.")]
Disk = Annotated[str | None, typer.Option(metavar="SIZE", help="Room for checkpoints, such as 500M or 20G.")]
BudgetTokens = Annotated[str | None, typer.Option(metavar="N", help="Tokens in all, ever.")]
BudgetSeconds = Annotated[str | None, typer.Option(metavar="N", help="Seconds of engine time in all, ever.")]
Expires = Annotated[
    str | None, typer.Option(metavar="WHEN", help="From now, such as 12h or 30d, or a date such as 2027-01-31.")
]

NO_LIMIT = "none"
_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent",
    "adapters",
    "disk_bytes",
    "budget_tokens",
    "budget_seconds",
)
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, for lists and logs.")],
    admin: Annotated[bool, typer.Option(help="May also see and look after what others made.")] = False,
    expires: Expires = None,
    requests: Requests = None,
    tokens: Tokens = None,
    concurrent: Concurrent = None,
    adapters: Adapters = None,
    disk: Disk = None,
    budget_tokens: BudgetTokens = None,
    budget_seconds: BudgetSeconds = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it: it is stored hashed, so this is the only time it can be seen."""
    given = (requests, tokens, concurrent, adapters, disk, budget_tokens, budget_seconds)
    with _keyring(data) as (ring, audit):
        from mint.server.keyring import Quota

        row, key = ring.create(name, Quota(**_limits(given)), admin, _moment(expires))
        audit.write("key_created", row.id, key_name=row.name, admin=row.admin)
    _show_key(row, key, as_json)


@keys.command("list")
def list_keys(
    data: Data = None,
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help="Revoked and expired ones too.")] = False,
) -> None:
    """List the keys and what they may use."""
    with _keyring(data) as (ring, _):
        rows = [row for row in ring.all() if everything or _state(row) == "active"]
    if as_json:
        print_json([_describe(row) for row in rows])
        return
    if not rows:
        typer.echo("There are no keys; `mint keys create NAME` makes one.")
        return
    print_table(
        ("name", "id", "begins", "made", "state", "limits"),
        [(row.name, row.id, row.hint, _day(row.created), _role(row), _limits_in_words(row)) for row in rows],
    )


@keys.command()
def revoke(name: Name, data: Data = None) -> None:
    """Let a key in no more, for good. What was made with it stays."""
    with _keyring(data) as (ring, audit):
        row = ring.revoke(name)
        audit.write("key_revoked", row.id, key_name=row.name)
    typer.echo(f"{row.name} ({row.id}) is revoked; running servers stop letting it in within two seconds.")


@keys.command()
def rotate(name: Name, data: Data = None, as_json: AsJson = False) -> None:
    """Replace the secret of a key; its runs, limits and usage stay. The old one is let in no more."""
    with _keyring(data) as (ring, audit):
        row, key = ring.rotate(name)
        audit.write("key_rotated", row.id, key_name=row.name)
    _show_key(row, key, as_json)


@keys.command("set")
def set_limits(
    name: Name,
    rename: Annotated[str | None, typer.Option(metavar="NAME", help="A new name.")] = None,
    admin: Annotated[bool | None, typer.Option("--admin/--no-admin", help="The role.")] = None,
    expires: Expires = None,
    requests: Requests = None,
    tokens: Tokens = None,
    concurrent: Concurrent = None,
    adapters: Adapters = None,
    disk: Disk = None,
    budget_tokens: BudgetTokens = None,
    budget_seconds: BudgetSeconds = None,
    data: Data = None,
) -> None:
    """Change a key's name, role, expiry or limits; the limit `none` takes one away."""
    values: dict[str, Any] = dict(
        _limits((requests, tokens, concurrent, adapters, disk, budget_tokens, budget_seconds))
    )
    if expires is not None:
        values["expires"] = _moment(expires)
    if admin is not None:
        values["admin"] = admin
    with _keyring(data) as (ring, audit):
        row = ring.change(name, rename, **values)
        audit.write(
            "key_changed", row.id, key_name=row.name, changed={**values, **({"name": rename} if rename else {})}
        )
    typer.echo(f"{row.name} ({row.id}): {_limits_in_words(row)}")


# Reading and showing ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _keyring(data: Path | None) -> Iterator[tuple[Keyring, Audit]]:
    from mint.config import ServerConfig
    from mint.server.audit import Audit
    from mint.server.keyring import Keyring
    from mint.server.store import Store

    config = ServerConfig.resolve(data=data)
    store = Store(config.database_address)
    try:
        yield Keyring(store), Audit(config.data, origin="mint keys")
    finally:
        store.close()


def _show_key(row: KeyRow, key: str, as_json: bool) -> None:
    if as_json:
        print_json(_describe(row) | {"key": key})
        return
    typer.echo(key)
    typer.echo(
        f"This is the key of {row.name} ({row.id}). It is not shown again. Clients take it from MINT_API_KEY or "
        "TINKER_API_KEY.",
        err=True,
    )


def _describe(row: KeyRow) -> dict[str, Any]:
    told = ("id", "name", "hint", "admin", "created", "expires", "revoked", *_LIMITS)
    return {field: getattr(row, field) for field in told} | {"state": _state(row)}


def _state(row: KeyRow) -> str:
    if row.revoked is not None:
        return "revoked"
    return "expired" if row.expires is not None and row.expires <= time.time() else "active"


def _role(row: KeyRow) -> str:
    return _state(row) + (", administrator" if row.admin else "")


def _limits_in_words(row: KeyRow) -> str:
    words = [f"{name.replace('_', ' ')} {getattr(row, name):,}" for name in _LIMITS if getattr(row, name) is not None]
    if row.expires is not None:
        words.append(f"expires {_day(row.expires)}")
    return ", ".join(words) or "no limits"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _limits(given: tuple[str | None, ...]) -> dict[str, Any]:
    """The limits that were given, in the order of `_LIMITS`; a limit of `none` is None."""
    return {name: _size(name, text) for name, text in zip(_LIMITS, given, strict=True) if text is not None}


def _size(name: str, text: str) -> int | float | None:
    if text.lower() == NO_LIMIT:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    units = _SIZES if name == "disk_bytes" else {unit: 1000**n for n, unit in enumerate(_SIZES)}
    if found is None:
        raise typer.BadParameter(f"{name} is {text!r}; give a number such as 1000, 50K or 20G, or none.")
    return round(float(found[1]) * units[found[2].upper()])


def _moment(text: str | None) -> float | None:
    return None if text is None or text.lower() == NO_LIMIT else moment("expires", text)
