"""What every page has around it: the bar on top, the way back, messages where there is nothing to show."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from fastapi import Request
from nicegui import ui

from mint.dashboard.data import Run
from mint.dashboard.site import Viewer, viewer_of

STATIC = Path(__file__).parent / "static"
ASSETS = "/assets"
PLACES = (("", "Runs"), ("playground", "Playground"), ("server", "Server"))
ICONS = {
    "theme": '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.8">'
    '<circle cx="12" cy="12" r="8.2"/>'
    '<path d="M12 3.8a8.2 8.2 0 0 0 0 16.4z" fill="currentColor" stroke="none"/></svg>',
    "leave": '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.8" stroke-linecap="round">'
    '<path d="M14 4H6v16h8M10 12h10m-3.5-4 4 4-4 4"/></svg>',
}


def markup(text: str) -> ui.html:
    """HTML that this package made; whatever comes from a run must have been through `html.escape`."""
    return ui.html(text, sanitize=False)


@contextmanager
def page(request: Request, title: str, place: str = "") -> Iterator[Viewer]:
    """The frame; the page is built inside."""
    viewer = viewer_of(request)
    ui.page_title(f"{title} · MinT")
    ui.colors(primary="#12a37f")
    mark = hashlib.sha256(b"".join((STATIC / name).read_bytes() for name in ("style.css", "mint.js"))).hexdigest()[:8]
    assets = viewer.link(ASSETS)
    ui.add_head_html(
        f'<link rel="stylesheet" href="{assets}/style.css?{mark}"><script src="{assets}/mint.js?{mark}"></script>'
    )
    with ui.element("header").classes("topbar"):
        markup(_bar(viewer, place)).style("display: contents")
    with ui.element("div").classes("page"):
        yield viewer


def _bar(viewer: Viewer, place: str) -> str:
    links = "".join(
        f'<a href="{viewer.link("/" + path)}" class="{"here" if name == place else ""}">{name}</a>'
        for path, name in PLACES
    )
    leave = (
        f'<a class="iconbutton" href="{viewer.link("/logout")}" title="Sign out">{ICONS["leave"]}</a>'
        if viewer.can_leave
        else ""
    )
    return (
        f'<a class="brand" href="{viewer.link("/")}"><span class="leaf"></span>MinT</a><nav>{links}</nav>'
        f'<div class="end"><button class="iconbutton" title="Light or dark (t)" onclick="mint.toggleTheme()">'
        f'{ICONS["theme"]}</button><button class="iconbutton" title="Keys (?)" onclick="mint.help()">?</button>'
        f"{leave}</div>"
    )


def run_link(viewer: Viewer, run: Run, page_name: str = "run", **query: object) -> str:
    asked = "&".join(f"{key}={quote(str(value), safe='')}" for key, value in query.items() if value is not None)
    return viewer.link(f"/{page_name}/{quote(run.name)}" + (f"?{asked}" if asked else ""))


def go(viewer: Viewer, address: str) -> None:
    """Opens one of our pages; NiceGUI puts the prefix before it again."""
    ui.navigate.to(address.removeprefix(viewer.prefix))


def run_heading(viewer: Viewer, run: Run, here: str) -> None:
    """Where we are, and the other pages of the same run."""
    name = html.escape(run.name)
    crumbs = (
        f'<div class="crumbs"><a class="up" href="{viewer.link("/")}">Runs</a><span class="slash">/</span>'
        f"<h1>{name}</h1></div>"
    )
    worst = "alarm" if any(alarm.severity == "alarm" for alarm in run.alarms) else "warning"
    count = f'<span class="chip {worst} count">{len(run.alarms)}</span>' if run.alarms else ""
    pages = (("run", "Curves", ""), ("step", "Rollouts", ""), ("ledger", "Ledger", ""), ("doctor", "Doctor", count))
    tabs = "".join(
        f'<a href="{run_link(viewer, run, path)}" class="{"here" if name == here else ""}">{name}{more}</a>'
        for path, name, more in pages
    )
    markup(f'<div class="heading">{crumbs}<div class="tabs">{tabs}</div></div>')


def empty(title: str, sentences: Sequence[str], command: str | None = None) -> None:
    """Nothing to show: why, and what to do."""
    told = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
    code = f"<pre>{html.escape(command)}</pre>" if command else ""
    markup(f'<div class="empty"><span class="leaf"></span><h2>{html.escape(title)}</h2>{told}{code}</div>').classes(
        "card"
    )


def banner(kind: str, text: str) -> None:
    markup(f'<div class="banner {kind}">{html.escape(text)}</div>')


def broken_lines(run: Run) -> None:
    """Says which lines were left out."""
    broken = run.broken
    if not broken:
        return
    first = broken[0]
    more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    banner(
        "warning",
        f"{first.file}, line {first.line}{more}: not JSON ({first.why}). Everything else is shown; mend or remove the "
        f"line in {run.dir.path / first.file}.",
    )


def tiles_html(tiles: Sequence[tuple[str, str, str]]) -> str:
    """Figures in a row: name, value, and what stands below it; values and what stands below are HTML."""
    return '<div class="tiles">{}</div>'.format(
        "".join(
            f'<div class="tile"><div class="name">{name}</div><div class="value">{value}</div>'
            f'<div class="more">{more}</div></div>'
            for name, value, more in tiles
        )
    )


def section(title: str) -> None:
    ui.label(title).classes("section")


def help_mark(text: str) -> None:
    """A question mark that explains itself."""
    with ui.element("span").classes("why"):
        ui.label("?")
        ui.tooltip(text)
