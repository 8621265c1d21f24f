"""Who is asking: keys given at the start, keys made by `mint keys`, and the tokens keys are exchanged for."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.exc import OperationalError

from mint.errors import Unauthorized
from mint.server.keyring import Keyring, Quota, digest_of
from mint.server.signer import Signer

log = logging.getLogger("mint.server")

HOUSE = "local"
"""Owner of everything made with the first key or with none, so that changing the one key of a server loses nothing.
Each further key is a tenant of its own, who sees only what it made and what was published."""
UNLIMITED = Quota()


@dataclass(frozen=True)
class User:
    name: str
    """Owner of whatever the user makes."""
    admin: bool = False
    """May see, publish and delete what others saved; still has models, samplers and requests of its own only."""

    def sees(self, owner: str) -> bool:
        return self.admin or self.name == owner


@dataclass(frozen=True)
class _Key:
    digest: bytes
    user: User
    label: str
    quota: Quota = UNLIMITED
    expires: float | None = None
    revoked: bool = False

    @property
    def over(self) -> str | None:
        """Why it is not let in any more."""
        if self.revoked:
            return "was revoked"
        return "has expired" if self.expires is not None and self.expires <= time.time() else None


class Keys:
    """The keys that are let in, kept as digests; changes to those in the database are noticed within `seconds`."""

    def __init__(self, keys: Sequence[str], keyring: Keyring, signer: Signer, seconds: float) -> None:
        self._given = [_given_key(n, digest_of(key)) for n, key in enumerate(keys)]
        self._keyring, self._signer, self._seconds = keyring, signer, seconds
        self._version: tuple[int, float] | None = None
        self._looked = 0.0
        self._keys: list[_Key] = []
        self._by_owner: dict[str, _Key] = {}

    def user(self, key: str | None) -> User:
        """The user of this key, or of the token it was exchanged for. Without keys everybody is the house; but once
        there has been a key, nobody is let in without one, even if all have been revoked."""
        self._look()
        if not self._keys:
            return User(HOUSE, admin=True)
        if not key:
            raise Unauthorized(
                "no API key was sent; set MINT_API_KEY (TINKER_API_KEY for the tinker SDK) to a key of this server."
            )
        is_token = key.startswith("eyJ")
        known = self._with_digest(self._digest_in(key) if is_token else digest_of(key))
        if known is None:
            sent = "token that was sent is expired or not of this server" if is_token else "API key is not known here"
            raise Unauthorized(
                f"the {sent}; set MINT_API_KEY (TINKER_API_KEY for the tinker SDK) to a key of this server: one it was "
                "started with, or one made by `mint keys create`."
            )
        if known.over:
            raise Unauthorized(f"the API key {known.label!r} {known.over}; ask whoever runs this server for a new one.")
        return known.user

    def token(self, key: str | None, user: User, seconds: float) -> str:
        """Stands for this key, and for no other of the same owner: when the key goes, the token goes with it."""
        is_token = key is not None and key.startswith("eyJ")
        digest = "" if key is None else self._digest_in(key) if is_token else digest_of(key)
        return self._signer.sign({"use": "api", "sub": user.name, "key": digest}, seconds)

    def quota(self, owner: str) -> Quota:
        known = self._by_owner.get(owner)
        return UNLIMITED if known is None else known.quota

    def owner(self, name: str) -> str | None:
        """The owner that goes by this name, or has this id."""
        named = {known.label: known.user.name for known in reversed(self._keys)}
        return named.get(name, name if name in self._by_owner or name == HOUSE else None)

    def label(self, owner: str) -> str:
        """The owner's name for people."""
        known = self._by_owner.get(owner)
        return owner if known is None else known.label

    def holder(self, owner: str) -> User | None:
        """The owner as a user; None if its key is let in no more."""
        self._look()
        if not self._keys:
            return User(HOUSE, admin=True) if owner == HOUSE else None
        known = self._by_owner.get(owner)
        return None if known is None or known.over else known.user

    def _digest_in(self, token: str) -> str:
        claims = self._signer.read(token)
        return "" if claims is None or claims.get("use") != "api" else str(claims.get("key", ""))

    def _with_digest(self, digest: str) -> _Key | None:
        """Compared with every key, each in constant time."""
        sent = digest.encode()
        matches = [hmac.compare_digest(sent, known.digest) for known in self._keys]
        return self._keys[matches.index(True)] if any(matches) else None

    def _look(self) -> None:
        now = time.monotonic()
        if self._version is not None and now - self._looked < self._seconds:
            return
        self._looked = now
        try:
            version = self._keyring.version()
            if version != self._version:
                self._version, self._keys = version, [*self._given, *self._stored()]
                self._by_owner = {known.user.name: known for known in self._keys}
        except OperationalError:
            if self._version is None:
                raise
            log.exception("the API keys could not be read again; those known so far stay")

    def _stored(self) -> list[_Key]:
        return [
            _Key(
                row.digest.encode(),
                User(row.id, row.admin),
                row.name,
                Quota.of(row),
                row.expires,
                row.revoked is not None,
            )
            for row in self._keyring.all()
        ]


def _given_key(number: int, digest: str) -> _Key:
    owner = HOUSE if number == 0 else f"key-{digest[:12]}"
    return _Key(digest.encode(), User(owner, admin=number == 0), owner)
