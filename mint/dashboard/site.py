"""Whose dashboard this is: the runs a viewer may see, and the server that viewer's questions go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import Request

from mint.config import ClientConfig
from mint.dashboard.data import Library
from mint.dashboard.serving import Serving

HOUSE = "local"
"""Owner of everything made with a server's first key, or with none: the same word as the server's."""
SCOPE = "mint.viewer"


@dataclass(frozen=True)
class Viewer:
    """One person looking."""

    owner: str
    library: Library
    serving: Serving
    prefix: str = ""
    """Where the dashboard is mounted."""
    can_leave: bool = False
    """Came in with a key, so may sign out."""

    def link(self, path: str) -> str:
        return f"{self.prefix}{path}"


@dataclass
class Site:
    """One mounted dashboard."""

    runs: Path
    server: ClientConfig | None = field(default_factory=ClientConfig)
    """Where the playground and the server page ask; without an address a local server, started when it is first
    needed; None: the very application this is mounted in."""
    owner_of: Callable[[str | None], str] | None = None
    """The owner of a key, or `MintError` for a key that is not let in. It is asked with None as well, and gives an
    owner where no key is needed. Without this function nobody is asked for a key."""
    prefix: str = ""

    def __post_init__(self) -> None:
        self.library = Library(self.runs)
        self._tenants: dict[str, Library] = {}

    def viewer(self, here: str, key: str | None = None, owner: str = HOUSE) -> Viewer:
        """The house sees every run. Any other tenant sees those in the subfolder that has its name. `here` is the
        address this application answers at."""
        library = self.library
        if owner != HOUSE:
            library = self._tenants.setdefault(owner, self.library.within(owner))
        asked = self.server or ClientConfig(here)
        config = ClientConfig(asked.base_url, asked.api_key if self.server else key)
        return Viewer(
            owner, library, Serving(config, itself=self.server is None), self.prefix, can_leave=key is not None
        )


def viewer_of(request: Request) -> Viewer:
    viewer: Viewer = request.scope[SCOPE]
    return viewer
