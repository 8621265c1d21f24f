"""docs/compatibility.md: what the compatibility tests found, as one page for users.

    .venv/bin/pytest tests/compat --write-compatibility

A test is a row, a client a column, the first line of the test's docstring the note. The words above the tables are
written by hand, in `page_header.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
WORKS = {"passed": "yes", "failed": "**no**", "skipped": "not run"}

WORDS = Path(__file__).with_name("page_header.md")


class Cell(NamedTuple):
    client: str
    scenario: str
    note: str


def cell_of(item: pytest.Function) -> Cell | None:
    """Client and scenario of a test; None for tests about no client."""
    if "client" in item.fixturenames:
        client = item.callspec.params["client"].name
    else:
        client = getattr(item.module, "CLIENT", None)
    note = (item.function.__doc__ or "").strip().partition("\n")[0]
    return Cell(client, scenario_of(item.function.__name__), note) if client else None


def scenario_of(function: str) -> str:
    return function.removeprefix("test_").replace("_", " ")


def page(outcomes: Mapping[Cell, str]) -> str:
    """The words, then a table for the clients that share scenarios and one for each of the others."""
    return WORDS.read_text() + "".join(_table(group, outcomes) for group in _groups(outcomes))


def rows_of(text: str) -> set[tuple[str, str]]:
    """Every (client, scenario) that a page has a result for."""
    found: set[tuple[str, str]] = set()
    clients: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| Scenario |"):
            clients = cells[1:-1]
        elif clients and line.startswith("| "):
            found |= {(client, cells[0]) for client, result in zip(clients, cells[1:], strict=False) if result != "-"}
    return found


def _groups(outcomes: Mapping[Cell, str]) -> list[list[str]]:
    clients = list(dict.fromkeys(cell.client for cell in outcomes))
    cookbooks = [client for client in clients if "cookbook" in client]
    return [[client for client in clients if client not in cookbooks], *([client] for client in cookbooks)]


def _table(clients: list[str], outcomes: Mapping[Cell, str]) -> str:
    results = {(cell.client, cell.scenario): WORKS[outcome] for cell, outcome in outcomes.items()}
    notes = {cell.scenario: cell.note for cell in outcomes if cell.client in clients}
    lines = [
        f"\n## {', '.join(clients)}\n",
        f"| Scenario | {' | '.join(clients)} | Note |",
        "|---" * (len(clients) + 2) + "|",
    ]
    for scenario, note in notes.items():
        marks = [results.get((client, scenario), "-") for client in clients]
        lines.append(f"| {scenario} | {' | '.join(marks)} | {re.sub(r'[|]', '/', note)} |")
    return "\n".join(lines) + "\n"
