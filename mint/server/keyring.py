"""The API keys in the database: made, listed, changed, replaced and revoked.

Used by `mint keys`, which may run beside a server, and by the server, which looks for changes once a second. Who is let
in with them is decided in `mint.server.auth`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import func, select

from mint.errors import BadRequest, NotFound
from mint.server.store import Store
from mint.server.tenant_rows import KeyRow

PREFIX = "tml-"
"""The tinker SDK refuses keys that begin otherwise; MinT's clients and mindlab-toolkit take these as well."""
_RANDOM_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True)
class Quota:
    """What a key may use; None is without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Read, sampled and trained ones together."""
    concurrent: int | None = None
    """Requests under way at once."""
    adapters: int | None = None
    """Training models at once."""
    disk_bytes: int | None = None
    """Of checkpoints."""
    budget_tokens: int | None = None
    """In all, over the life of the key."""
    budget_seconds: float | None = None
    """Of engine time, in all."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise BadRequest(f"{name} is {value}; a limit must be above 0 (to shut a key out, revoke it).")

    @classmethod
    def of(cls, row: KeyRow) -> Quota:
        return cls(**{field.name: getattr(row, field.name) for field in fields(cls)})


def digest_of(key: str) -> str:
    """What is kept of a key. Keys are 256 random bits, so there is nothing to guess and nothing to look up in a table
    of likely ones: a slow or salted hash, made for passwords, would only make every request slower."""
    return hashlib.sha256(key.encode()).hexdigest()


class Keyring:
    def __init__(self, store: Store) -> None:
        self._store = store

    def create(
        self, name: str, quota: Quota | None = None, admin: bool = False, expires: float | None = None
    ) -> tuple[KeyRow, str]:
        """The new key's row, and the key itself, which is nowhere else."""
        self._check_name(name)
        if expires is not None and expires <= time.time():
            raise BadRequest(f"the key {name!r} would expire before it is made; give a moment in the future.")
        key = _new_key()
        row = KeyRow(
            id=f"key-{secrets.token_hex(8)}",
            name=name,
            digest=digest_of(key),
            hint=_hint(key),
            admin=admin,
            expires=expires,
            **asdict(quota or Quota()),
        )
        self._store.add(row)
        return row, key

    def all(self) -> Sequence[KeyRow]:
        return self._store.all(select(KeyRow).order_by(KeyRow.created))

    def version(self) -> tuple[int, float]:
        """Changes whenever any key does."""
        with self._store.transaction() as session:
            count, newest = session.execute(select(func.count(KeyRow.id), func.max(KeyRow.changed))).one()
            return count, newest or 0.0

    def find(self, name: str) -> KeyRow:
        """By name, where the key that is not revoked comes first, or by id."""
        rows = self._store.all(select(KeyRow).where((KeyRow.name == name) | (KeyRow.id == name)))
        if not rows:
            known = ", ".join(row.name for row in self.all() if row.revoked is None) or "none yet"
            raise NotFound(f"there is no key {name!r}; there are: {known}.")
        return min(rows, key=lambda row: (row.revoked is not None, -row.created))

    def revoke(self, name: str) -> KeyRow:
        return self._change(self._usable(name), revoked=time.time())

    def rotate(self, name: str) -> tuple[KeyRow, str]:
        """A new key in place of the old one, which is let in no more; what it owns and may do stays."""
        key = _new_key()
        return self._change(self._usable(name), digest=digest_of(key), hint=_hint(key)), key

    def change(self, name: str, new_name: str | None = None, **values: Any) -> KeyRow:
        """Sets limits, expiry or role; `new_name` renames."""
        row = self._usable(name)
        if new_name is not None:
            self._check_name(new_name)
            values["name"] = new_name
        Quota(**{field.name: values[field.name] for field in fields(Quota) if field.name in values})  # checks
        return self._change(row, **values)

    def _usable(self, name: str) -> KeyRow:
        row = self.find(name)
        if row.revoked is not None:
            raise BadRequest(f"the key {name!r} has been revoked, which is for good; create a new one.")
        return row

    def _change(self, row: KeyRow, **values: Any) -> KeyRow:
        self._store.update(row, changed=time.time(), **values)
        return row

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise BadRequest(f"a key cannot be called {name!r}; use letters, digits and . _ @ - (at most 64).")
        if any(row.name == name and row.revoked is None for row in self.all()):
            raise BadRequest(f"there is a key {name!r} already; choose another name, or revoke that one first.")


def _new_key() -> str:
    return PREFIX + secrets.token_hex(_RANDOM_BYTES)


def _hint(key: str) -> str:
    return key[: len(PREFIX) + 6]
