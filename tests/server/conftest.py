from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Live


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Live]]:
    """Starts servers with the limits and keys given, and stops them."""
    started: list[Live] = []

    def start(**options: Any) -> Live:
        started.append(Live(tmp_path / "data", **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def live(serve: Callable[..., Live]) -> Live:
    return serve()
