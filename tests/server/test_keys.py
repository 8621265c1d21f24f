"""API keys: stored hashed, seen once, let in from the moment they are made to the moment they are revoked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import mint
from mint.server.keyring import PREFIX, Keyring, Quota
from mint.server.store import Store
from tests.server.databases import BOTH_DATABASES
from tests.server.live import Live
from tests.server.tenants import Keychain, audit_lines

Serve = Callable[..., Live]


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(Store(tmp_path / "mint.db"))


def test_a_key_is_stored_as_its_digest_alone(ring: Keyring, tmp_path: Path) -> None:
    row, key = ring.create("alice")
    assert key.startswith(PREFIX)
    assert len(key) == len(PREFIX) + 64, "256 random bits in hex"
    assert row.digest == hashlib.sha256(key.encode()).hexdigest()
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert row.digest.encode() in stored
    assert key.encode() not in stored
    assert key[12:].encode() not in stored


def test_names_are_checked_and_taken_once_until_revoked(ring: Keyring) -> None:
    first, _ = ring.create("alice")
    with pytest.raises(mint.BadRequest, match="already"):
        ring.create("alice")
    with pytest.raises(mint.BadRequest, match="cannot be called"):
        ring.create("a b")
    ring.revoke("alice")
    second, _ = ring.create("alice")
    assert ring.find("alice").id == second.id != first.id
    assert ring.find(first.id).revoked is not None
    with pytest.raises(mint.NotFound, match="there are: alice"):
        ring.find("bob")


def test_a_limit_must_be_above_nothing(ring: Keyring) -> None:
    with pytest.raises(mint.BadRequest, match="adapters is 0"):
        Quota(adapters=0)
    ring.create("alice")
    with pytest.raises(mint.BadRequest, match="disk_bytes is -1"):
        ring.change("alice", disk_bytes=-1)


def status(live: Live, key: str | None) -> int:
    headers = {} if key is None else {"X-API-Key": key}
    return httpx.get(f"{live.url}/api/v1/sessions", headers=headers).status_code


@BOTH_DATABASES
def test_keys_come_and_go_while_the_server_runs(live: Live) -> None:
    assert status(live, None) == 200, "without any key a loopback server is open"
    chain = Keychain(live)
    _, key = chain.ring.create("alice")
    assert (status(live, key), status(live, None), status(live, "tml-guess")) == (200, 401, 401)
    _, new = chain.ring.rotate("alice")
    assert (status(live, key), status(live, new)) == (401, 200)
    chain.ring.change("alice", new_name="alina")
    assert status(live, new) == 200
    chain.ring.revoke("alina")
    assert (status(live, new), status(live, None)) == (401, 401), "a server never falls open again"


def test_an_expired_key_is_refused_by_name(live: Live) -> None:
    ring = Keychain(live).ring
    _, key = ring.create("alice", expires=time.time() + 3600)
    assert status(live, key) == 200
    ring.change("alice", expires=time.time() - 1)
    refused = httpx.get(f"{live.url}/api/v1/sessions", headers={"X-API-Key": key})
    assert refused.status_code == 401
    assert "'alice' has expired" in refused.json()["detail"]


def test_what_was_made_stays_with_a_key_that_is_replaced_or_renamed(live: Live) -> None:
    chain = Keychain(live)
    alice = chain.tenant("alice")
    path = alice.save(alice.model(), 1)
    chain.ring.change("alice", new_name="alina")
    _, key = chain.ring.rotate("alina")
    found = live.tenant(key).get("/checkpoints")["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in found] == [path]


def test_a_token_goes_with_the_key_it_was_exchanged_for(live: Live) -> None:
    chain = Keychain(live)
    token = chain.tenant("alice").post("/auth/token")["jwt"]
    again = live.tenant(token).post("/auth/token")["jwt"]
    assert status(live, token) == status(live, again) == 200
    chain.ring.rotate("alice")
    assert status(live, token) == status(live, again) == 401


def test_keys_given_at_the_start_and_keys_made_later_go_together(serve: Serve) -> None:
    live = serve(keys=("tml-house", "tml-second"))
    alice = Keychain(live).tenant("alice")
    assert alice.get("/sessions") == {"sessions": []}
    assert status(live, "tml-house") == status(live, "tml-second") == 200


def test_failed_sign_ins_are_written_down_once_a_minute(serve: Serve) -> None:
    live = serve(keys=("tml-house",))
    assert [status(live, "tml-guess") for _ in range(5)] == [401] * 5
    [line] = audit_lines(live, "sign_in_failed")
    assert (line["from"], line["result"], line["key"]) == ("127.0.0.1", "401", None)
    assert "tml-guess" not in (live.config.data / "audit.jsonl").read_text()


def test_a_new_data_folder_is_its_owners_alone(serve: Serve) -> None:
    assert serve().config.data.stat().st_mode & 0o077 == 0
