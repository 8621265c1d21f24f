"""The dashboard as a part of an application."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from nicegui import app as pages
from nicegui import ui

from mint.config import ClientConfig
from mint.dashboard import doctor, ledger, playground, rollout, run, runs, server
from mint.dashboard.frame import ASSETS, STATIC
from mint.dashboard.gate import Gate
from mint.dashboard.site import Site

PAGES = (runs, run, rollout, ledger, doctor, playground, server)
"""Importing a page registers it."""
LOCAL = ClientConfig()
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><path d="M3 3h12a14 14 0 0 1 14 14v12H17A14 14 0 0 1 '
    '3 15z" fill="#12a37f"/></svg>'
)


def mount(
    app: FastAPI,
    runs: str | Path = "runs",
    server: ClientConfig | None = LOCAL,
    owner_of: Callable[[str | None], str] | None = None,
    prefix: str = "",
) -> None:
    """Adds the dashboard of the runs in a folder, under `prefix`.

    `server` is where the playground and the server page ask: without an address a local server, started when it is
    first needed; None means the application itself.
    `owner_of` gives the owner of a key or raises `MintError`; visitors are asked for a key unless it has an owner for
    None.
    """
    pages.add_static_files(ASSETS, STATIC)
    ui.run_with(
        app,
        mount_path=prefix or "/",
        title="MinT",
        favicon=ICON,
        dark=None,  # as the system asks, until somebody chooses (static/mint.js)
        show_welcome_message=False,
        reconnect_timeout=30.0,
        tailwind=False,
    )
    app.add_middleware(Gate, site=Site(Path(runs), server, owner_of, prefix))
