"""The store, on SQLite and on a real PostgreSQL: rows, transactions, and a schema that is brought up to date."""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, create_engine, inspect, select, text
from sqlalchemy.exc import IntegrityError

from mint.errors import BadRequest, Busy
from mint.server import migrations
from mint.server.database import Database, lock_of
from mint.server.keyring import Keyring
from mint.server.store import CheckpointRow, RunRow, SamplerRow, SessionRow, Store
from tests.server.databases import BOTH_DATABASES

pytestmark = BOTH_DATABASES


def session_row(id: str = "s") -> SessionRow:
    return SessionRow(id=id, owner="me", tags=["ä"], user_metadata={"k": "v"})


def run_row(id: str = "r", session: str | None = "s") -> RunRow:
    flags = {"train_unembed": True, "train_mlp": True, "train_attn": False}
    return RunRow(id=id, session_id=session, owner="me", base_model="mint/tiny", rank=4, user_metadata={}, **flags)


def checkpoint_row(name: str, size_bytes: int = 1) -> CheckpointRow:
    return CheckpointRow(run_id="r", kind="weights", name=name, owner="me", folder=name, size_bytes=size_bytes)


@pytest.fixture
def store(database: str):
    opened = Store(database)
    yield opened
    opened.close()


@pytest.fixture
def engine(database: str):
    """Of a database with today's schema."""
    opened = Database(database)
    yield opened.engine
    opened.close()


def filled(store: Store) -> Store:
    store.add(session_row())
    store.add(run_row())
    return store


# Rows ---------------------------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_from_a_store_opened_again(store: Store, database: str) -> None:
    filled(store).add(checkpoint_row("one", 5 << 30))
    other = Store(database)
    session, run = other.get(SessionRow, "s"), other.get(RunRow, "r")
    [checkpoint] = other.all(select(CheckpointRow))
    assert (session.tags, session.user_metadata, session.ended) == (["ä"], {"k": "v"}, None)
    assert (run.train_mlp, run.train_attn, run.session_id) == (True, False, "s")
    assert checkpoint.size_bytes == 5 << 30
    assert checkpoint.created == pytest.approx(run.created, abs=60), "seconds, with their fractions"
    other.close()


def test_a_page_knows_how_many_there_are_in_all(store: Store) -> None:
    filled(store).add(*(checkpoint_row(f"{n}") for n in range(5)))
    rows, total = store.page(select(CheckpointRow).order_by(CheckpointRow.name), limit=2, offset=1)
    assert ([row.name for row in rows], total) == (["1", "2"], 5)


def test_replacing_is_both_or_neither(store: Store) -> None:
    filled(store).add(checkpoint_row("one"), checkpoint_row("two"))
    [one, two] = store.all(select(CheckpointRow).order_by(CheckpointRow.name))
    with pytest.raises(IntegrityError):
        store.replace([one], checkpoint_row("two"))
    assert len(store.all(select(CheckpointRow))) == 2
    store.replace([one, two], checkpoint_row("two"))
    store.replace([one])  # gone already
    assert [row.name for row in store.all(select(CheckpointRow))] == ["two"]


def test_a_deleted_checkpoints_number_is_never_given_again(store: Store) -> None:
    first, second = checkpoint_row("one"), checkpoint_row("two")
    filled(store).add(first)
    store.replace([first])
    store.add(second)
    assert second.id > first.id


def test_a_row_without_what_it_refers_to_is_refused(store: Store) -> None:
    with pytest.raises(IntegrityError):
        store.add(run_row(session="nobody"))


def test_updates_of_many_threads_all_arrive(store: Store) -> None:
    filled(store)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.add(checkpoint_row(f"{n}")), range(40)))
    assert len(store.all(select(CheckpointRow))) == 40


def test_text_the_database_cannot_hold_is_the_requests_fault(store: Store, database: str) -> None:
    if database.startswith("sqlite"):
        assert store.get(SessionRow, "a\0b") is None
    else:
        with pytest.raises(BadRequest, match="cannot hold"):
            store.get(SessionRow, "a\0b")


# Schema -------------------------------------------------------------------------------------------------------------


def test_the_newest_revision_is_what_the_tables_say(engine: Engine) -> None:
    """If this fails, the tables were changed: `python -m mint.server.migrations "what changes"` writes the revision."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, migrations.all_tables()) == []


def test_a_new_table_is_a_difference(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE settings"))
    with engine.connect() as connection:
        [(change, table)] = compare_metadata(MigrationContext.configure(connection), migrations.all_tables())
    assert (change, table.name) == ("add_table", "settings")


def test_revisions_form_one_line(database: str) -> None:
    scripts = ScriptDirectory(str(migrations.HERE))
    assert len(scripts.get_heads()) == 1, "two revisions follow the same one: number one of them anew"
    assert migrations.known_revisions() == [f"{n + 1:04d}" for n in range(len(migrations.known_revisions()))]


def old_database(address: str, revision: str) -> Engine:
    """One that a server of that time left, with something in every table of the first revision."""
    engine = create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        command.upgrade(migrations._config(connection), revision)
        reflected = MetaData()
        reflected.reflect(connection)

        def add(table: str, *rows: dict[str, object]) -> None:
            connection.execute(
                reflected.tables[table].insert(), [{"owner": "me", "created": 1.5} | row for row in rows]
            )

        add("sessions", {"id": "s", "tags": ["ä"], "user_metadata": {"k": "v"}})
        flags = {"train_unembed": True, "train_mlp": True, "train_attn": False, "user_metadata": {}}
        add("runs", {"id": "r", "session_id": "s", "base_model": "mint/tiny", "rank": 4, "last_request": 2.5, **flags})
        add("samplers", {"id": "s:sample:0", "session_id": "s", "base_model": "mint/tiny", "ephemeral": False})
        saved = {"run_id": "r", "kind": "weights", "size_bytes": 1, "public": True}
        add("checkpoints", *({"name": name, "folder": name, **saved} for name in "abc"))
        connection.execute(text("DELETE FROM checkpoints WHERE name = 'c'"))
    return engine


@pytest.mark.parametrize("revision", migrations.known_revisions()[:-1])
def test_a_database_of_every_earlier_schema_is_upgraded_with_what_is_in_it(
    database: str, revision: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    engine = old_database(database, revision)
    store = Store(database)
    try:
        assert migrations.is_current(engine)
        assert (store.get(SessionRow, "s").tags, store.get(SessionRow, "s").created) == (["ä"], 1.5)
        assert (store.get(RunRow, "r").rank, store.get(RunRow, "r").last_request) == (4, 2.5)
        assert store.get(SamplerRow, "s:sample:0").ephemeral is False
        kept = store.all(select(CheckpointRow).order_by(CheckpointRow.id))
        assert [(row.path, row.public) for row in kept] == [(f"tinker://r/weights/{name}", True) for name in "ab"]
        large = checkpoint_row("d", size_bytes=3 << 30)
        store.add(large)
        assert large.id == 4, "the third, deleted before the upgrade, keeps its number"
        assert Keyring(store).create("alice")[0].name == "alice"
    finally:
        store.close()
        engine.dispose()


def test_servers_that_start_at_once_make_one_schema(database: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: Store(database), range(6)))
    stores[0].add(session_row())
    assert all(store.get(SessionRow, "s") is not None for store in stores)
    for store in stores:
        store.close()


def test_a_newer_schema_is_refused_and_left_alone(database: str) -> None:
    Store(database).close()
    engine = _plain_engine(database)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(BadRequest, match=r"schema 9999.*knows schemas up to.*newer version"):
        Store(database)
    assert migrations.revision_of(engine) == "9999"


def test_a_schema_is_not_changed_under_a_running_server(database: str) -> None:
    engine = _plain_engine(database)
    with engine.begin() as connection:
        command.upgrade(migrations._config(connection), "0001")
    running = lock_of(engine)  # of an older server
    assert running.try_shared()
    with pytest.raises(Busy, match=r"from 0001 to .*other servers"):
        Database(database, patience_seconds=0.2)
    assert "settings" not in inspect(engine).get_table_names()
    threading.Timer(0.3, running.close).start()
    later = Database(database)  # as soon as the other has ended
    assert "settings" in inspect(engine).get_table_names()
    later.close()


def test_a_revision_that_fails_leaves_nothing_behind(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., None] = migrations._upgrade

    def fails(connection) -> None:
        whole(connection)
        raise RuntimeError("the power went")

    monkeypatch.setattr(migrations, "_upgrade", fails)
    with pytest.raises(RuntimeError):
        Database(database)
    assert inspect(_plain_engine(database)).get_table_names() == []
    monkeypatch.undo()
    Database(database).close()


def test_the_next_revision_is_written_by_one_command(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "migrations"
    shutil.copytree(migrations.HERE, copy)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE settings"))  # as if it were new in the tables
    monkeypatch.setattr(migrations, "HERE", copy)
    number = f"{len(migrations.known_revisions()) + 1:04d}"
    written = migrations.write_revision(engine, "adds settings")
    assert written.name == f"{number}_adds_settings.py"
    assert "op.create_table('settings'" in written.read_text()
    assert migrations.known_revisions()[-1] == number


def _plain_engine(database: str) -> Engine:
    if database.startswith("sqlite:///"):
        Path(database.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
