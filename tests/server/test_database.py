"""What is particular to one database: files from before revisions, addresses, a PostgreSQL that goes away, sharing."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from mint.errors import BadRequest, Busy
from mint.server import database as database_module
from mint.server import migrations
from mint.server.database import Database
from mint.server.store import CheckpointRow, SamplerRow, SessionRow, Store
from tests.server.databases import Postgres
from tests.server.live import Live

BEFORE_REVISIONS = Path(__file__).parents[1] / "data" / "store_before_revisions.sql"


def test_a_file_from_before_revisions_is_upgraded_in_place_without_loss(tmp_path: Path) -> None:
    file = tmp_path / "mint.db"
    old = sqlite3.connect(file)
    old.executescript(BEFORE_REVISIONS.read_text())
    tables = ("sessions", "runs", "samplers", "checkpoints")
    before = {table: old.execute(f"SELECT * FROM {table}").fetchall() for table in tables}
    assert all(before.values())
    store = Store(file)
    assert {table: old.execute(f"SELECT * FROM {table}").fetchall() for table in tables} == before
    assert [row.path for row in store.all(select(CheckpointRow).order_by(CheckpointRow.id))] == [
        "tinker://s1:train:0/weights/one",
        "tinker://s1:train:0/sampler_weights/one",
    ]
    assert store.get(SamplerRow, "s1:sample:0").model_path == "tinker://s1:train:0/weights/one"
    new = CheckpointRow(run_id="ckpt_1", kind="weights", name="new", owner="local", folder="new", size_bytes=1)
    store.add(new)
    assert new.id == 4, "the third, deleted before the upgrade, keeps its number"
    store.close()
    assert old.execute("SELECT version_num FROM alembic_version").fetchall() == [(migrations.known_revisions()[-1],)]


@pytest.mark.parametrize("address", ["mysql://u:geheim@h/x", "sqlite://", "sqlite:///:memory:", "nonsense"])
def test_other_databases_are_refused_without_telling_the_password(address: str) -> None:
    with pytest.raises(BadRequest, match=r"postgresql://user@host/mint") as refused:
        Database(address)
    assert "geheim" not in str(refused.value)


def test_a_postgres_that_cannot_be_reached_is_named_without_its_password() -> None:
    with pytest.raises(Busy, match="cannot be reached") as refused:
        Database("postgresql://mint:geheim@/x?host=/nowhere")
    assert "geheim" not in str(refused.value)


def test_a_store_outlives_the_end_of_its_connections(postgres: Postgres) -> None:
    store = Store(postgres.empty_database())
    store.add(SessionRow(id="s", owner="me", tags=[], user_metadata={}))
    postgres.end_connections()
    assert store.get(SessionRow, "s") is not None
    store.close()


def test_a_postgres_that_is_restarted_under_a_server_costs_nobody_anything(postgres: Postgres, tmp_path: Path) -> None:
    live = Live(tmp_path / "data", database=postgres.empty_database())
    try:
        model = live.model()
        path = live.save(model, 1)
        postgres.halt()
        try:
            assert live.fetch(live.step(model, 2))["metrics"] == {"step": 1.0}, "training goes on without it"
            answer = live.http.get("/training_runs")
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert live.http.get(f"{live.url}/readyz").status_code == 503
            refused = live.post("/create_session", {"tags": []}, ok=False)
            assert refused.status_code == 503
            save = {"model_id": model, "seq_id": 3, "path": "later"}
            refused = live.post("/save_weights", save, ok=False)
            assert refused.status_code == 503 and str(postgres.folder) not in refused.text
        finally:
            postgres.start()
        assert [run["training_run_id"] for run in live.get("/training_runs")["training_runs"]] == [model]
        later = live.fetch(live.post("/save_weights", save))["path"]
        assert sorted(c["tinker_path"] for c in live.get("/checkpoints")["checkpoints"]) == sorted([path, later])
        assert live.fetch(live.step(model, 4))["metrics"] == {"step": 2.0}
        assert live.get("/mint/status")["queue"]["requests"] == 0, "who was turned away is in no queue"
        assert live.http.get(f"{live.url}/readyz").status_code == 200
    finally:
        live.stop()


def test_two_servers_share_runs_and_checkpoints(postgres: Postgres, tmp_path: Path) -> None:
    database = postgres.empty_database()
    one, two = (Live(tmp_path / "data", database=database, port=port) for port in (1, 2))
    try:
        path = one.save(one.model(), 1)
        assert [c["tinker_path"] for c in two.get("/checkpoints")["checkpoints"]] == [path]
        body = {"session_id": two.session(), "model_seq_id": 0, "path": path, "optimizer": True}
        assert two.fetch(two.post("/load_weights", body))["path"] == path
        assert one.get("/training_runs")["cursor"]["total_count"] == 2
    finally:
        one.stop()
        two.stop()


def test_a_server_started_on_a_full_disk_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def full_at_first(connection: sqlite3.Connection, *given: Any) -> None:
        tries.append(given)
        if len(tries) < 2:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
            raise error
        set_pragmas(connection, *given)

    set_pragmas = database_module._set_pragmas
    monkeypatch.setattr(database_module, "_set_pragmas", full_at_first)
    Database(tmp_path / "mint.db").close()
    assert len(tries) > 1
