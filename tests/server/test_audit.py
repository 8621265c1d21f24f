"""The audit log: one line for everything that matters, none of them with a secret, and never too large."""

from __future__ import annotations

import json
import multiprocessing
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from mint.server import audit
from mint.server.audit import FILE, KEPT, Audit
from tests.server.live import Live
from tests.server.tenants import Keychain, audit_lines

Serve = Callable[..., Live]


def test_the_life_of_a_checkpoint_is_written_down(serve: Serve) -> None:
    live = serve(keys=("tml-house",))
    chain = Keychain(live)
    alice = chain.tenant("alice")
    model = alice.model()
    path = alice.save(model, 1)
    address = f"/training_runs/{model}/checkpoints/weights/one"
    alice.post(f"{address}/publish")
    alice.http.delete(f"{address}/publish")
    assert httpx.get(alice.http.get(f"{address}/archive").headers["location"]).is_success
    copy = {"source_path": path, "session_id": alice.session(), "model_seq_id": 5}
    copied = alice.post("/copy_weights", copy)["tinker_path"]
    alice.http.delete(address)
    lines = [json.loads(line) for line in (live.config.data / FILE).read_text().splitlines()]
    assert [(line["event"], line["target"]) for line in lines] == [
        ("run_created", model),
        ("checkpoint_saved", path),
        ("checkpoint_published", path),
        ("checkpoint_unpublished", path),
        ("checkpoint_downloaded", path),
        ("checkpoint_copied", copied),
        ("checkpoint_deleted", path),
    ]
    assert {(line["key"], line["from"], line["result"]) for line in lines} == {(chain.id("alice"), "127.0.0.1", "ok")}
    assert "tml-" not in (live.config.data / FILE).read_text()


def test_a_save_that_a_crash_interrupted_is_written_down_when_it_is_done(serve: Serve) -> None:
    live = serve(port=8000)
    model = live.model()
    live.backend.hold()
    saving = live.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "one"})
    live.restart(finish=False)
    path = live.fetch(saving)["path"]
    [line] = audit_lines(live, "checkpoint_saved")
    assert (line["target"], line["key"]) == (path, "local")


def test_the_log_is_its_owners_alone_and_rotates(tmp_path: Path) -> None:
    log = Audit(tmp_path, largest_bytes=1000)
    for n in range(100):
        log.write("run_created", "alice", str(n))
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == sorted([FILE, *(f"{FILE}.{n}" for n in range(1, KEPT + 1))])
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    told = [json.loads(line)["target"] for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    kept = sorted(map(int, told))
    assert kept == list(range(100 - len(kept), 100)), "the newest lines, each once"


def _write_many(folder: Path, who: str) -> None:
    log = Audit(folder, largest_bytes=2000)
    for n in range(60):
        log.write("run_created", who, str(n))


def test_two_processes_that_write_and_rotate_at_once_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "KEPT", 100)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path, who)) for who in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    told = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert sorted((line["key"], int(line["target"])) for line in told) == [(w, n) for w in "ab" for n in range(60)]


def test_a_flood_is_one_line_and_then_a_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(audit.time, "monotonic", lambda: now)
    log = Audit(tmp_path)
    for _ in range(50):
        log.write_some("refused", "alice", "429", limit="tokens_per_minute")
    log.write_some("refused", "alice", "429", limit="adapters")
    now = 61.0
    log.write_some("refused", "alice", "429", limit="tokens_per_minute")
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [(line["limit"], line["unlogged_before"]) for line in lines] == [
        ("tokens_per_minute", 0),
        ("adapters", 0),
        ("tokens_per_minute", 49),
    ]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    Audit(tmp_path / "nowhere").write("run_created", "alice")
