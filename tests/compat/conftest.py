"""Environments, servers and clients of the compatibility tests; and the page that is written from their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat import document
from tests.compat.clients import KINDS, Client
from tests.compat.environments import environment as find_environment
from tests.compat.serving import Served, mint_serve

OUTCOMES = pytest.StashKey[dict[document.Cell, str]]()


@pytest.fixture(scope="session")
def environment(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Finds an environment by name; says so if it must be built first."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", flush=True)

    return lambda name: find_environment(name, say)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with mint_serve(tmp_path_factory.mktemp("served"), ["mint/tiny"]) as server:
        yield server


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.name)
def client(request: pytest.FixtureRequest, served: Served, environment: Callable[[str], Path]) -> Client:
    return Client(request.param, served, environment)


# The page -------------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-compatibility", action="store_true", help=f"write {document.PAGE.name} from the results")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.compat)
            item.add_marker(pytest.mark.timeout(1200))  # the first one may have to build an environment
            if isinstance(item, pytest.Function) and (cell := document.cell_of(item)):
                item.user_properties.append(("compat", cell))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OUTCOMES] = {}
    config.pluginmanager.register(_Recorder(config))


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell: Any = dict(report.user_properties).get("compat")
        if cell and (report.when == "call" or report.failed):
            self._config.stash[OUTCOMES][cell] = report.outcome

    def pytest_sessionfinish(self) -> None:
        if self._config.getoption("--write-compatibility", default=False):
            document.PAGE.write_text(document.page(self._config.stash[OUTCOMES]))
