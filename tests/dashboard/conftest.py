"""A dashboard in a process of its own, and a real browser to look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from mint.rl.rundir import RunDir
from tests.dashboard.folders import write_agent, write_run

ROOT = Path(__file__).parents[2]
expect.set_options(timeout=30_000)  # a busy machine is not a fault
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


@contextmanager
def served(runs: Path, *options: str) -> Iterator[str]:
    """The address of `mint dashboard RUNS`."""
    command = [sys.executable, "-m", "mint.cli", "dashboard", str(runs), "--port", "0", *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MINT_", "TINKER_"))}
    environment |= {"PYTHONUNBUFFERED": "1", "MINT_HOME": str(runs.parent / "home")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as child:
        try:
            assert child.stdout is not None
            line = next(line for line in child.stdout if "http://" in line)
            yield next(word for word in line.split() if word.startswith("http://"))
        finally:
            child.terminate()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of every kind."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    write_run(folder / "good")
    for seed in range(2):
        write_run(folder / f"seeds/{seed}", seed=seed, lift=0.1 * seed)
    write_agent(folder / "agent")
    RunDir(folder / "starting").write_config({"log_path": str(folder / "starting")})
    broken = write_run(folder / "broken")
    with open(broken.metrics_file, "a") as file:
        file.write('{"step": 4, "env/all/rew\n')
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text('{"hidden_size": 8}\n')
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(runs, "--server", "http://127.0.0.1:9") as url:  # where nobody answers
        yield url


@pytest.fixture(scope="module")  # while it lives it has an event loop in this thread, which other tests must not meet
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).is_file():
        pytest.fail(f"there is no browser at {CHROMIUM}: install Chromium, or set CHROMIUM to where it is.")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A laptop's screen. A script that fails, or a request that leaves this machine, fails the test."""
    context = browser.new_context(viewport={"width": 1366, "height": 768}, color_scheme="dark")
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)

    def note(url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:")):
            faults.append(f"left the machine: {url}")

    page.on("request", lambda request: note(request.url))
    page.on("websocket", lambda socket: note(socket.url))
    yield page
    context.close()
    assert not faults
