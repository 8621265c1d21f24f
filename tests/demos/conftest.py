"""The bundled model on a real server, and the demos importable as their users import them."""

import os
from collections.abc import Iterator

import pytest

from tests.rl.conftest import ROOT, tiny_server  # noqa: F401


@pytest.fixture(autouse=True)
def demos_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (ROOT, ROOT / "demos" / "rl", ROOT / "demos" / "rl" / "adapters"):
        monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def served(tiny_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:  # noqa: F811
    """A script's surroundings: a server by environment, nothing else set, a folder of its own."""
    for name in list(os.environ):
        if name.startswith(("MINT_", "TINKER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("MINT_BASE_URL", tiny_server)
    monkeypatch.chdir(tmp_path)
    yield
