"""A full disk, where nothing can be written, not even to the database: requests wait, and what makes room goes on."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from mint.server import state
from mint.server.journal import Disk
from mint.server.signer import Signer
from mint.server.store import Store
from tests.fakes import FakeBackend
from tests.server.live import Live
from tests.waiting import eventually

PORT = 8125


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve(port=PORT)


def no_room(*_: object) -> None:
    raise OperationalError("WRITE", {}, sqlite3.OperationalError("database or disk is full"))


def test_a_full_disk_refuses_a_request_that_can_be_sent_again(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = live.model()
    body = {"session_id": model.partition(":")[0], "model_seq_id": 1, "base_model": "mint/tiny"}
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write", full)
        for refused in (live.step(model, 1, ok=False), live.post("/create_model", body, ok=False)):
            assert refused.status_code == 429, refused.text
            assert "make room" in refused.text
            assert float(refused.headers["retry-after"]) > 0
    assert live.backend.steps[model] == 0
    assert live.fetch(live.step(model, 1))["metrics"]["step"] == 1.0
    assert live.fetch(live.post("/create_model", body))["model_id"].endswith(":train:1")


def test_a_full_disk_under_the_database_is_no_5xx(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", no_room)
        assert live.post("/create_session", {"tags": []}, ok=False).status_code == 429
    assert live.session()


def test_a_snapshot_taken_while_the_database_is_full_is_sampled_from_memory(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tries = live.model(), []

    def full(_: Store, *rows: Any) -> None:
        tries.append(rows)
        no_room()

    monkeypatch.setattr(Store, "insert", full)
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 7}
    sampler = live.fetch(live.post("/save_weights_for_sampler", body))["sampling_session_id"]
    monkeypatch.undo()
    assert len(tries) == 1
    assert live.fetch(live.sample(sampler, 0))["sequences"]


def test_a_model_is_unloaded_on_a_full_disk(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    model = live.model()
    live.fetch(live.step(model, 1))
    monkeypatch.setattr(Store, "transaction", no_room)
    assert live.fetch(live.post("/unload_model", {"model_id": model}))["type"] == "unload_model"
    assert model not in live.backend.adapters


def test_what_sessions_leave_is_cleared_away_on_a_full_disk(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing can be written, not even to the database: else it would stay full for good."""
    session, other = live.session(), live.session()
    models = [live.model(session), live.model(other)]
    for model in models:
        body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 7}
        live.fetch(live.post("/save_weights_for_sampler", body))
    home = live.app.state.server.home.folder

    monkeypatch.setattr(Store, "transaction", no_room)
    live.fall_silent(session, 10_000)
    live.fall_silent(other, 10_000)
    eventually(lambda: not live.backend.adapters and not live.backend.policies)
    eventually(lambda: not list(home.glob("snapshots/*")) and not list(home.glob("models/*")))
    assert "could not be written down: database or disk is full" in caplog.text
    monkeypatch.undo()


def test_a_checkpoint_is_deleted_on_a_full_disk(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    model = live.model()
    path = live.save(model, 1, "one")
    folder = next((live.config.data / "checkpoints").glob("*/weights/one"))
    replace = Store.replace

    def full_while_it_is_there(store: Store, *rows: Any) -> None:
        if folder.exists():
            no_room()
        replace(store, *rows)

    monkeypatch.setattr(Store, "replace", full_while_it_is_there)
    run_id, _, name = path.removeprefix("tinker://").partition("/")
    assert live.http.delete(f"/training_runs/{run_id}/checkpoints/{name}").is_success
    assert not folder.exists()
    assert not live.get(f"/training_runs/{run_id}/checkpoints")["checkpoints"]


def test_a_server_is_stopped_in_order_on_a_full_disk(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = live.model()
    live.fetch(live.step(model, 1))

    with monkeypatch.context() as patch:
        patch.setattr(Store, "transaction", no_room)
        live.stop()
    assert "what was used last could not be written" in caplog.text
    assert "Traceback" not in caplog.text
    live._start(FakeBackend())
    assert live.fetch(live.step(model, 2))["metrics"]["step"] == 2.0


def test_a_model_created_while_the_database_is_full_is_there_when_there_is_room(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, tries = live.session(), []
    add = Store.add

    def full_at_first(store: Store, *rows: Any) -> None:
        tries.append(rows)
        if len(tries) < 2:
            no_room()
        add(store, *rows)

    monkeypatch.setattr(Store, "add", full_at_first)
    model = live.model(session)
    assert len(tries) == 2
    assert live.get(f"/training_runs/{model}")["training_run_id"] == model


def test_a_server_that_starts_on_a_full_disk_waits_for_room(
    serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    def full_at_first(data: Path) -> Signer:
        tries.append(data)
        if len(tries) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return Signer(data)

    monkeypatch.setattr(state, "Signer", full_at_first)
    assert serve().model()
    assert len(tries) == 2
