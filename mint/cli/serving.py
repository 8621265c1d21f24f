"""The HTTP server of `mint serve`: uvicorn over an engine, until it is told to end.

Its imports are heavy: `mint.cli.serve` imports it when the engine's process is on its way.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
import uvicorn
from fastapi import FastAPI

from mint.backend import Backend
from mint.config import ServerConfig
from mint.errors import MintError
from mint.server.app import create_app
from mint.server.auth import HOUSE
from mint.server.connections import bounded
from mint.server.limits import Limits
from mint.server.state import open_store
from mint.server.watch import log_as_json

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection, so that none is closed under a request."""
GRACE_SECONDS = 1
"""How long requests under way may take to end; polls are held for longer, and clients come back anyway."""


def serve_until_told(config: ServerConfig, runs: Path | None, engine: Backend, failed: threading.Event) -> bool:
    """To end, or until `failed` is set; whether the server ever started. Without a folder of runs it is the child of a
    script, as `mint.cli.serve.run` says."""
    log_as_json(logging.WARNING if runs is None else logging.INFO)
    _check_places(config)
    app = create_app(config, engine)
    if runs is not None:
        show(app, runs)
    server = _Server(app, config, is_child=runs is None, failed=failed)
    _load(engine, config.models)
    if runs is None:
        _end_with_parent(server)
    # What is there by now stays: no collection of garbage need look through all of it again, in the midst of a request.
    gc.freeze()
    server.run()
    return server.started


class _Server(uvicorn.Server):
    """Says where it listens, and leaves signals to those who close the engine after it."""

    def __init__(self, app: FastAPI, config: ServerConfig, is_child: bool, failed: threading.Event) -> None:
        settings = uvicorn.Config(
            app,
            config.host,
            config.port,
            http=bounded(Limits(connections=min(Limits.connections, _most_files() // 2))),
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
            access_log=False,
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        super().__init__(settings)
        self._serving = config
        self._is_child = is_child
        self._failed = failed

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's own, which raises the signal again afterwards: then the engine would not be closed."""
        before = {kind: signal.signal(kind, self.handle_exit) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            config = self._serving
            port = self.servers[0].sockets[0].getsockname()[1]
            url = f"{'http' if config.tls_cert is None else 'https'}://{config.host}:{port}"
            ready = f"MinT serves at {url} (data in {config.data}, dashboard at {url}/dashboard)"
            typer.echo(f"MINT_READY {url}" if self._is_child else ready)

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._failed.is_set()


def show(app: FastAPI, runs: Path) -> None:
    """The dashboard, for whoever has a key of the server, as soon as it has keys. Administrators see what the house
    sees."""
    from mint.dashboard import mount

    def owner_of(key: str | None) -> str:
        user = app.state.server.keys.user(key)
        return HOUSE if user.admin else str(user.name)

    mount(app, runs, server=None, owner_of=owner_of, prefix="/dashboard")


def _check_places(config: ServerConfig) -> None:
    """Where a fault can be told in a sentence."""
    try:
        store, storage = open_store(config)
    except MintError as error:
        typer.echo(f"mint serve: {error}", err=True)
        raise typer.Exit(1) from error
    storage.close()
    store.close()


def _load(engine: Backend, models: Sequence[str]) -> None:
    """Before the server starts, where a model that is not there can be told in a sentence."""
    for name, facts in [(name, engine.load_model(name)) for name in models]:
        try:
            facts.result()
        except MintError as error:
            typer.echo(f"mint serve: {name} cannot be served: {error}", err=True)
            raise typer.Exit(1) from error


def _most_files() -> int:
    """How many files and connections this process may have open, which is made as many as it can be: a busy client
    opens hundreds, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def _end_with_parent(server: uvicorn.Server) -> None:
    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would be held when the interpreter ends before this thread
            pass
        server.should_exit = True

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
