"""docs/compatibility.md has a result for every compatibility test there is, and for no other."""

from __future__ import annotations

import pytest

from tests.compat import document, test_clients, test_cookbook


def test_the_page_names_every_scenario_that_is_tested(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-compatibility", default=False):
        pytest.skip("the page is being written")
    known = document.rows_of(document.PAGE.read_text())
    cells = [document.cell_of(item) for item in request.session.items if isinstance(item, pytest.Function)]
    missing = {(cell.client, cell.scenario) for cell in cells if cell} - known
    assert not missing, f"{missing}: run pytest tests/compat --write-compatibility"


def test_the_page_names_no_scenario_that_is_gone() -> None:
    tests = {document.scenario_of(name) for module in (test_clients, test_cookbook) for name in vars(module)}
    gone = {scenario for _, scenario in document.rows_of(document.PAGE.read_text())} - tests
    assert not gone, f"{gone}: run pytest tests/compat --write-compatibility"


def test_a_page_that_was_written_reads_back() -> None:
    cells = {
        document.Cell("tinker 1", "it learns", "a note"): "passed",
        document.Cell("tinker 2", "it learns", "a note"): "failed",
        document.Cell("cookbook 3", "it | loops", ""): "passed",
    }
    assert document.rows_of(document.page(dict(list(cells.items())[:2]))) == {
        ("tinker 1", "it learns"),
        ("tinker 2", "it learns"),
    }
    assert "| it learns | yes | **no** | a note |" in document.page(cells)
