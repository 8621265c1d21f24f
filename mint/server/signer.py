"""Signed claims: the tokens that keys are exchanged for, and download links that carry their own grant."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from mint.errors import Forbidden


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

    def link(self, target: str, holder: str, seconds: float) -> str:
        return self.sign({"use": "download", "target": target, "holder": holder}, seconds)

    def target(self, token: str) -> tuple[str, str]:
        """What a download link leads to, and who asked for it."""
        claims = self.read(token)
        if claims is None or claims.get("use") != "download":
            raise Forbidden("this download link is expired or was altered; ask for a new one.")
        return claims["target"], claims["holder"]

    def _mac(self, signed: str) -> bytes:
        return hmac.new(self._secret, signed.encode(), hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _secret_of(file: Path) -> bytes:
    """The secret in this file, made on first use; of two servers that start at once, one wins and both read it."""
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix="secret-") as new:  # only the owner may read it
            new.write(os.urandom(32))
            new.flush()
            with contextlib.suppress(FileExistsError):
                os.link(new.name, file)
    return file.read_bytes()
