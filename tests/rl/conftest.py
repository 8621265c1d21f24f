"""A real server with the bundled model, for the few tests that need one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `mint serve`, which lasts for the session."""
    command = [sys.executable, "-m", "mint.cli", "serve", "--port", "0", "--model", "mint/tiny"]
    home = str(tmp_path_factory.mktemp("home"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MINT_", "TINKER_"))}
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment | {"MINT_HOME": home, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "http://" in line)
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        server.terminate()
        server.wait(PATIENCE)
