"""One hash for everything that must come out the same in every process and every run: seeds, splits, shuffles."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: object) -> int:
    """32 bits of the parts' reprs, in order."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")
