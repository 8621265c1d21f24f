from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.databases import Postgres
from tests.server.live import Live


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.stop()


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return f"sqlite:///{tmp_path / 'data' / 'mint.db'}"
    return request.getfixturevalue("postgres").empty_database()


@pytest.fixture
def serve(tmp_path: Path, database: str) -> Iterator[Callable[..., Live]]:
    """Starts servers with the limits and keys given, and stops them."""
    started: list[Live] = []

    def start(**options: Any) -> Live:
        started.append(Live(tmp_path / "data", database=database, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve()
