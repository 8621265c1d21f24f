"""`mint keys` and `mint usage` on a data folder: made, shown once, changed, revoked, told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mint.cli.__main__ import app
from mint.server.keyring import digest_of
from mint.server.store import CheckpointRow, RunRow, Store
from mint.server.usage import Counter, Used


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MINT_BASE_URL", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def mint(data: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--data", str(data)])


def keys(data: Path, *more: str) -> list[dict[str, Any]]:
    return json.loads(mint(data, "keys", "list", "--json", *more).stdout)


def test_a_key_is_printed_once_and_alone_on_standard_output(tmp_path: Path) -> None:
    made = mint(tmp_path, "keys", "create", "alice")
    key = made.stdout.strip()
    assert key.startswith("tml-")
    assert "not shown again" in made.stderr
    listed = mint(tmp_path, "keys", "list").stdout
    assert "alice" in listed and key[:10] in listed
    assert key not in listed + mint(tmp_path, "keys", "list", "--json").stdout
    assert key not in (tmp_path / "audit.jsonl").read_text()


def test_limits_are_given_with_units_and_taken_away_again(tmp_path: Path) -> None:
    options = ["--tokens-per-minute", "50K", "--disk", "2G", "--adapters", "3", "--budget-seconds", "3600"]
    mint(tmp_path, "keys", "create", "alice", *options, "--expires", "30d")
    [key] = keys(tmp_path)
    limits = ("tokens_per_minute", "disk_bytes", "adapters", "budget_seconds", "requests_per_minute")
    assert [key[limit] for limit in limits] == [50_000, 2 * 2**30, 3, 3600, None]
    assert key["expires"] == pytest.approx(time.time() + 30 * 86400, abs=60)
    changes = ["--disk", "none", "--requests-per-minute", "10", "--rename", "alina", "--admin", "--expires", "none"]
    assert mint(tmp_path, "keys", "set", "alice", *changes).exit_code == 0
    [key] = keys(tmp_path)
    assert [key[name] for name in ("name", "disk_bytes", "requests_per_minute", "admin", "expires", "adapters")] == [
        "alina", None, 10, True, None, 3,
    ]  # fmt: skip


def test_a_revoked_key_is_listed_only_when_asked_for(tmp_path: Path) -> None:
    mint(tmp_path, "keys", "create", "alice")
    assert mint(tmp_path, "keys", "revoke", "alice").exit_code == 0
    assert keys(tmp_path) == []
    assert [key["state"] for key in keys(tmp_path, "--all")] == ["revoked"]


def test_a_replaced_key_keeps_its_id(tmp_path: Path) -> None:
    before = json.loads(mint(tmp_path, "keys", "create", "alice", "--json").stdout)
    after = json.loads(mint(tmp_path, "keys", "rotate", "alice", "--json").stdout)
    assert before["id"] == after["id"]
    assert digest_of(before["key"]) != digest_of(after["key"])


def test_every_change_is_in_the_audit_log(tmp_path: Path) -> None:
    for words in (["create", "a"], ["set", "a", "--adapters", "1"], ["rotate", "a"], ["revoke", "a"]):
        mint(tmp_path, "keys", *words)
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["key_created", "key_changed", "key_rotated", "key_revoked"]
    assert all(line["from"].startswith("mint keys by ") and line["key_name"] == "a" for line in lines)


def test_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    for words, told in (
        (["revoke", "nobody"], "there is no key 'nobody'"),
        (["create", "a b"], "cannot be called"),
        (["create", "a", "--disk", "much"], "disk_bytes is 'much'"),
        (["create", "a", "--expires", "soon"], "expires is 'soon'"),
        (["create", "a", "--adapters", "0"], "adapters is 0"),
    ):
        failed = mint(tmp_path, "keys", *words)
        assert failed.exit_code == (3 if words[0] == "revoke" else 2)
        assert told in failed.output
    assert keys(tmp_path) == []


def test_usage_is_told_from_the_data_folder(tmp_path: Path) -> None:
    alice = json.loads(mint(tmp_path, "keys", "create", "alice", "--json").stdout)["id"]
    store = Store(tmp_path / "mint.db")
    counter = Counter(store)
    counter.add(alice, "run-1", Used(requests=3, sampled_tokens=1200, engine_seconds=2.5))
    counter.add(alice, "run-2", Used(requests=1, trained_tokens=300))
    counter.add("local", "", Used(requests=1, prompt_tokens=7))
    counter.flush()
    shape = {"base_model": "m", "rank": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    store.add(RunRow(id="run-1", owner=alice, user_metadata={}, **shape))
    place = {"kind": "weights", "name": "one", "folder": "x"}
    store.add(CheckpointRow(run_id="run-1", owner=alice, size_bytes=64, **place))
    told = json.loads(mint(tmp_path, "usage", "--json").stdout)
    assert [(line["key"], line["run"], line["disk_bytes"]) for line in told] == [
        ("alice", "run-1", 64),
        ("alice", "run-2", 0),
        ("local", "", 0),
    ]
    table = mint(tmp_path, "usage", "--key", "alice").stdout
    assert "in all" in table and "1,200" in table and "local" not in table
    [line] = json.loads(mint(tmp_path, "usage", "--run", "run-2", "--since", "1d", "--json").stdout)
    assert line["trained_tokens"] == 300
    assert mint(tmp_path, "usage", "--key", "bob").exit_code == 3
