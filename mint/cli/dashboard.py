"""`mint dashboard [RUNS]`: look at runs in a browser, live or finished, with no account and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dashboard(
    runs: Annotated[Path, typer.Argument(help="Folder of runs, or one run directory.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8001,
    server: Annotated[
        str | None,
        typer.Option(help="Server for the playground.", show_default="MINT_BASE_URL, else a local one when needed"),
    ] = None,
) -> None:
    """Show runs in a browser: curves, rollouts token by token, the ledger, the doctor, a playground."""
    import socket

    import uvicorn
    from fastapi import FastAPI

    from mint.cli.serve import LOOPBACK, has_keys
    from mint.config import ClientConfig, ServerConfig
    from mint.dashboard import mount

    owner_of = None
    if host not in LOOPBACK:
        config = ServerConfig.resolve(host=host)
        if not config.api_keys and not has_keys(config):
            typer.echo(
                f"mint dashboard: refusing to listen on {host} without keys: everybody on the network could read your "
                "runs. Make a key with `mint keys create NAME`, or set MINT_API_KEY to a secret of your choice, or "
                "leave --host at 127.0.0.1.",
                err=True,
            )
            raise typer.Exit(2)
        from mint.server.auth import HOUSE, Keys
        from mint.server.keyring import Keyring
        from mint.server.limits import Limits
        from mint.server.signer import Signer
        from mint.server.store import Store

        ring = Keyring(Store(config.database_address))
        keys = Keys(config.api_keys, ring, Signer(config.data), Limits().keys_seconds)

        def owner_of(key: str | None) -> str:
            user = keys.user(key)
            return HOUSE if user.admin else user.name

    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)  # whoever comes before the pages are ready waits instead of being turned away
    except OSError as error:
        typer.echo(f"mint dashboard: port {port} of {host} cannot be used ({error}); try another --port.", err=True)
        raise typer.Exit(1) from error
    app = FastAPI(openapi_url=None)
    mount(app, runs, ClientConfig.resolve(server), owner_of)
    typer.echo(f"MinT shows {runs} at http://{host}:{listening.getsockname()[1]} (Ctrl-C ends it)")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
