"""The local server: it comes up, it is private, and it never outlives the process that started it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import mint
from mint import local
from tests.waiting import PATIENCE, eventually, is_gone

STUB = Path(__file__).parent / "client" / "local_stub.py"
ROOT = Path(__file__).parents[1]

# A script that starts the stub as its local server, says who is who, and then ends as the test wants.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import mint.local as local
local.COMMAND = (sys.executable, {stub!r})
server = local.local_server()
assert server is local.local_server()
config = server.wait_until_ready()
print(server.pid, config.base_url, flush=True)
{then}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINT_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def servers() -> Iterator[list[local.LocalServer]]:
    started: list[local.LocalServer] = []
    yield started
    for server in started:
        server.stop()


def _script(then: str) -> subprocess.Popen[str]:
    code = SCRIPT.format(stub=str(STUB), then=then)
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _server_of(script: subprocess.Popen[str]) -> int:
    assert script.stdout is not None
    return int(script.stdout.readline().split()[0])


def test_the_server_comes_up_on_loopback_with_a_key_of_its_own(home: Path, servers: list[local.LocalServer]) -> None:
    server = local.LocalServer([sys.executable, str(STUB)], home)
    servers.append(server)
    config = server.wait_until_ready()
    assert str(config.base_url).startswith("http://127.0.0.1:")
    assert config.api_key
    assert httpx.get(str(config.base_url), headers={"X-API-Key": config.api_key}).status_code == 200
    assert httpx.get(str(config.base_url)).status_code == 401
    assert server.running
    server.stop()
    eventually(lambda: is_gone(server.pid))
    assert not server.running
    assert "ask for every result before" in (server.obituary() or "")


def test_waiting_prints_one_line_that_names_the_log(
    home: Path, servers: list[local.LocalServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for, progress = home / "waited for", local._progress

    def shown_first(what: str) -> contextlib.AbstractContextManager[None]:
        waited_for.touch()
        return progress(what)

    monkeypatch.setattr(local, "_progress", shown_first)
    servers.append(local.LocalServer([sys.executable, str(STUB), "--when", str(waited_for)], home))
    servers[0].wait_until_ready()
    servers[0].wait_until_ready()
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert str(servers[0].log) in shown
    assert "stub: --when" in servers[0].log.read_text()


def test_a_server_that_fails_to_start_shows_the_end_of_its_log(home: Path, servers: list[local.LocalServer]) -> None:
    servers.append(local.LocalServer([sys.executable, str(STUB), "--broken"], home))
    with pytest.raises(mint.Internal, match=r"exited with status 1.*\n.*\n?the stub is broken"):
        servers[0].wait_until_ready()


def test_a_server_that_takes_too_long_is_given_up_and_stopped(
    home: Path, servers: list[local.LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "STOP_WITHIN", 0.2)
    servers.append(local.LocalServer([sys.executable, str(STUB), "--slow"], home))
    with pytest.raises(mint.Internal, match="not ready within 0 s"):
        servers[0].wait_until_ready(within=0.3)
    eventually(lambda: is_gone(servers[0].pid))


def test_a_server_that_dies_is_known_to_be_dead_and_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch, servers: list[local.LocalServer]
) -> None:
    monkeypatch.setattr(local, "COMMAND", (sys.executable, str(STUB)))
    monkeypatch.setattr(local, "_server", None)
    first = local.local_server()
    servers.append(first)
    first.wait_until_ready()
    assert first.obituary() is None
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: not first.running)
    assert "killed by signal 9" in (first.obituary() or "")
    second = local.local_server()
    servers.append(second)
    assert second is not first
    assert second.wait_until_ready() != first.wait_until_ready(), "with a key of its own"


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("", 0),
        ("raise RuntimeError('a fault of the script')", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(60)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(3)", 3),
    ],
    ids=["return", "exception", "ctrl-c", "kill -9", "os._exit"],
)
def test_no_server_outlives_its_script(home: Path, then: str, status: int) -> None:
    script = _script(then)
    server = _server_of(script)
    assert script.wait(PATIENCE) == status
    eventually(lambda: is_gone(server))


def test_a_forked_child_neither_stops_the_server_nor_keeps_it_alive(home: Path) -> None:
    script = _script(
        """
import urllib.request
heard, told = os.pipe()
child = os.fork()
if child == 0:
    assert local.local_server().wait_until_ready() == config
    if os.fork() == 0:
        sys.exit(0)          # runs this process's exit hooks
    os.wait()
    os.write(told, b".")
    time.sleep(600)
os.read(heard, 1)
request = urllib.request.Request(config.base_url, headers={"X-API-Key": config.api_key})
print(child, urllib.request.urlopen(request).status, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    server = _server_of(script)
    assert script.stdout is not None
    child, status = script.stdout.readline().split()
    try:
        assert status == "200"
        assert script.wait(PATIENCE) == -signal.SIGKILL
        eventually(lambda: is_gone(server))
        assert not is_gone(int(child))
    finally:
        os.kill(int(child), signal.SIGKILL)


def _with_descendants(root: int) -> set[int]:
    """A process and all that it started, and they."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(") ")[2].split()[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def test_a_killed_script_leaves_neither_server_nor_engine(home: Path) -> None:
    code = """
import mint, mint.local, os, signal
mint.ServiceClient().get_server_capabilities()
print(mint.local.local_server().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL) if input() else None
"""
    script = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert script.stdin is not None
    assert script.stdout is not None
    family = _with_descendants(int(script.stdout.readline()))
    assert len(family) >= 2, "a server and an engine, at least"
    script.stdin.write("die\n")
    script.stdin.flush()
    assert script.wait(PATIENCE) == -signal.SIGKILL
    eventually(lambda: all(is_gone(pid) for pid in family))


def test_two_scripts_at_once_have_a_server_each(home: Path) -> None:
    scripts = [_script("sys.stdin.read()") for _ in range(2)]
    addresses = {script.stdout.readline().split()[1] for script in scripts if script.stdout}
    for script in scripts:
        script.kill()
        script.wait()
    assert len(addresses) == 2


def test_only_the_newest_logs_are_kept(home: Path) -> None:
    for _ in range(25):
        local._new_log(home / "logs").touch()
    assert len(list((home / "logs").iterdir())) == local._LOGS_KEPT
