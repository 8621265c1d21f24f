"""Keys of a live server, made as `mint keys` makes them: by another connection to the same data."""

from __future__ import annotations

import json
from typing import Any

from mint.server.audit import FILE
from mint.server.keyring import Keyring, Quota
from mint.server.store import Store
from tests.server.live import Live


class Keychain:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._store = Store(live.config.database_address)
        self.ring = Keyring(self._store)

    def tenant(self, name: str, admin: bool = False, **quota: Any) -> Live:
        _, key = self.ring.create(name, Quota(**quota), admin)
        return self._live.tenant(key)

    def id(self, name: str) -> str:
        return self.ring.find(name).id


def audit_lines(live: Live, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (live.config.data / FILE).read_text().splitlines()]
    return [line for line in lines if line["event"] == event]
