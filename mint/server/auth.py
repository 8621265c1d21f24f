"""Who is asking: API keys, the tokens keys are exchanged for, and links that carry their own grant."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mint.errors import Forbidden, Unauthorized

HOUSE = "local"
"""Owner of everything made with the first key or with none, so that changing the one key of a server loses nothing.
Each further key is a tenant of its own, who sees only what it made and what was published."""


@dataclass(frozen=True)
class User:
    name: str


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Keys:
    """The keys that are let in, kept as digests."""

    def __init__(self, keys: Sequence[str], signer: Signer) -> None:
        self._digests = [_digest(key) for key in keys]
        self._owners = [HOUSE if n == 0 else f"key-{digest.hex()[:12]}" for n, digest in enumerate(self._digests)]
        self._signer = signer

    def user(self, key: str | None) -> User:
        """The user of this key, or of the token it was exchanged for; without keys, everybody is the house."""
        if not self._digests:
            return User(HOUSE)
        if not key:
            raise Unauthorized(
                "no API key was sent; set MINT_API_KEY (TINKER_API_KEY for the tinker SDK) to a key of this server."
            )
        if key.startswith("eyJ"):
            return self._user_of_token(key)
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise Unauthorized(
                "this server does not know the API key that was sent; set MINT_API_KEY (TINKER_API_KEY for the tinker "
                "SDK) to one of the keys it was started with."
            )
        return User(self._owners[matches.index(True)])

    def _user_of_token(self, token: str) -> User:
        claims = self._signer.read(token)
        if claims is None or claims.get("use") != "api" or claims.get("sub") not in self._owners:
            raise Unauthorized(
                "the token that was sent is expired or not of this server; set MINT_API_KEY (TINKER_API_KEY for the "
                "tinker SDK) to one of the keys it was started with."
            )
        return User(claims["sub"])

    def token(self, user: User, seconds: float) -> str:
        return self._signer.sign({"use": "api", "sub": user.name}, seconds)


class Signer:
    """Signs claims as JSON web tokens (HS256) with a secret that lives in the data folder."""

    def __init__(self, data: Path) -> None:
        self._secret = _secret_of(data / "secret")

    def sign(self, claims: dict[str, Any], seconds: float) -> str:
        body = claims | {"exp": int(time.time() + seconds), "iat": int(time.time())}
        signed = f"{_encode(json.dumps({'alg': 'HS256', 'typ': 'JWT'}).encode())}.{_encode(json.dumps(body).encode())}"
        return f"{signed}.{_encode(self._mac(signed))}"

    def read(self, token: str) -> dict[str, Any] | None:
        """The claims, or None for a token that is expired, altered or somebody else's."""
        signed, _, signature = token.rpartition(".")
        try:
            if not hmac.compare_digest(_decode(signature), self._mac(signed)):
                return None
            claims = json.loads(_decode(signed.partition(".")[2]))
        except ValueError:
            return None
        return claims if claims["exp"] > time.time() else None

    def link(self, target: str, seconds: float) -> str:
        return self.sign({"use": "download", "target": target}, seconds)

    def target(self, token: str) -> str:
        claims = self.read(token)
        if claims is None or claims.get("use") != "download":
            raise Forbidden("this download link is expired or was altered; ask for a new one.")
        return claims["target"]

    def _mac(self, signed: str) -> bytes:
        return hmac.new(self._secret, signed.encode(), hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _secret_of(file: Path) -> bytes:
    """The secret in this file, made on first use; of two servers that start at once, one wins and both read it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix="secret-") as new:  # only the owner may read it
            new.write(os.urandom(32))
            new.flush()
            with contextlib.suppress(FileExistsError):
                os.link(new.name, file)
    return file.read_bytes()
