"""The schema's history: how a database of any earlier version becomes one of today's, in one transaction.

Revisions lie in `versions/`, one file each. `python -m mint.server.migrations "what changes"` writes the next one from
the difference between the tables in `mint.server` and the newest revision. Who may migrate when is decided in
`mint.server.database`.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData

from mint.errors import BadRequest

HERE = Path(__file__).parent


def known_revisions() -> list[str]:
    """From the oldest to the newest."""
    return [script.revision for script in reversed(list(_scripts().walk_revisions()))]


def revision_of(engine: Engine) -> str | None:
    """The database's; None for one without tables, or from before there were revisions."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def is_current(engine: Engine) -> bool:
    """Whether the schema is today's. One that is not known here is refused."""
    found, known = revision_of(engine), known_revisions()
    if found is not None and found not in known:
        raise BadRequest(
            f"the database {engine.url.render_as_string()} has schema {found}; this version of MinT knows schemas up "
            f"to {known[-1]}. It was made by a newer version: use that one, or a copy of the database from before."
        )
    return found == known[-1]


def upgrade(engine: Engine) -> None:
    """Everything or nothing: both databases make tables within a transaction."""
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            _upgrade(connection)
        return
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        # Tables that are rebuilt would take the rows that refer to them along; outside of a transaction only.
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.commit()
        with connection.begin():
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver begins none for changes of the schema
            _upgrade(connection)
            if broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first():
                raise BadRequest(
                    f"the database {engine.url.database} has a row in {broken[0]} without its {broken[2]}."
                )
        connection.exec_driver_sql("PRAGMA foreign_keys=ON")


def write_revision(engine: Engine, message: str) -> Path:
    """The next revision's file: what the tables have and the database, which is at the newest revision, has not."""
    all_tables()
    number = f"{len(known_revisions()) + 1:04d}"
    with engine.connect() as connection:
        script = command.revision(_config(connection), message, autogenerate=True, rev_id=number)
    assert script is not None and not isinstance(script, list)
    return Path(script.path)


def all_tables() -> MetaData:
    """With those of every module of the server."""
    server = importlib.import_module("mint.server")
    for module in pkgutil.iter_modules(server.__path__, "mint.server."):
        importlib.import_module(module.name)
    from mint.server.store import Row

    return Row.metadata


def _upgrade(connection: Connection) -> None:
    command.upgrade(_config(connection), "head")


def _config(connection: Connection | None = None) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
