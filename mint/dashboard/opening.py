"""Opening a run by the name in an address, or saying why that cannot be."""

from __future__ import annotations

from nicegui import ui

from mint.dashboard.data import Run
from mint.dashboard.frame import empty
from mint.dashboard.site import Viewer
from mint.errors import BadRequest, NotFound


def opened(viewer: Viewer, name: str) -> Run | None:
    """None once the page says what is wrong."""
    try:
        return viewer.library.run(name)
    except NotFound as error:
        empty("No such run", [str(error)])
    except BadRequest as error:
        empty("This folder is not a run", [str(error)])
    ui.link("All runs", viewer.link("/")).classes("plain").style("align-self: center")
    return None
