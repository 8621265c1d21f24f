"""The `mint` command: light to ask for help, careful about where it listens, and gone when it should be."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from mint.cli.__main__ import app
from mint.config import ServerConfig
from mint.version import __version__
from tests.waiting import PATIENCE, eventually, is_gone

MINT = [sys.executable, "-m", "mint.cli"]


def test_help_lists_the_verbs_without_loading_anything_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from mint.cli.__main__ import app\n"
        "shown = CliRunner().invoke(app, ['serve', '--help']); assert '--model' in shown.output, shown.output\n"
        "print(sorted({'torch', 'transformers', 'fastapi', 'uvicorn', 'sqlalchemy'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"mint {__version__}"


@pytest.mark.parametrize("name", ["deterministic", "bfloat16", "lean"])
def test_how_to_compute_is_asked_for_by_flags(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr("mint.cli.serve.run", lambda config, runs: served.append(config))
    for flags in ([], [f"--{name}"]):
        assert CliRunner().invoke(app, ["serve", "--port", "0", "--data", str(tmp_path), *flags]).exit_code == 0
    assert [getattr(config, name) for config in served] == [False, True]


def test_listening_to_the_world_without_keys_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MINT_API_KEY", raising=False)
    refused = CliRunner().invoke(app, ["serve", "--host", "0.0.0.0", "--data", str(tmp_path)])
    assert refused.exit_code == 2
    assert "`mint keys create NAME`, or set MINT_API_KEY" in refused.output
    assert list(tmp_path.iterdir()) == []


def start(tmp_path: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server with the real engine, and its address."""
    process = subprocess.Popen(
        [*MINT, "serve", "--port", "0", "--data", str(tmp_path), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"MINT_API_KEY": "tml-one, tml-two", "OMP_NUM_THREADS": "1"},
    )
    line = process.stdout.readline().decode()
    assert "http://" in line, f"{line!r}, exit {process.poll()}"
    return process, next(word for word in line.split() if word.startswith("http://"))


def children_of(pid: int) -> list[int]:
    children: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children += map(int, file.read_text().split())
    return children


def wait_until_gone(pids: list[int]) -> None:
    eventually(lambda: all(is_gone(pid) for pid in pids))


def test_a_local_server_ends_with_its_engine_when_the_parent_lets_go(tmp_path: Path) -> None:
    process, url = start(tmp_path, "--local")
    engine = children_of(process.pid)
    assert httpx.get(f"{url}/api/v1/get_server_capabilities", headers={"X-API-Key": "tml-two"}).status_code == 200
    assert httpx.get(f"{url}/api/v1/get_server_capabilities").status_code == 401
    process.stdin.close()
    assert process.wait(PATIENCE) == 0
    assert engine
    wait_until_gone(engine)


def test_a_server_whose_engine_is_killed_starts_another(tmp_path: Path) -> None:
    process, _ = start(tmp_path, "--local", "--model", "mint/tiny")
    [engine] = children_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    children = eventually(lambda: [pid for pid in children_of(process.pid) if pid != engine])
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(PATIENCE) == 0
    wait_until_gone([engine, *children])


def test_a_signal_ends_the_server_and_its_engine(tmp_path: Path) -> None:
    process, url = start(tmp_path, "--model", "mint/tiny")
    engine = children_of(process.pid)
    told = httpx.get(f"{url}/api/v1/get_server_capabilities", headers={"X-API-Key": "tml-one"}).json()
    assert told["supported_models"][0]["max_context_length"] == 1024, "a named model is loaded before it is ready"
    process.terminate()
    assert process.wait(PATIENCE) == 0
    wait_until_gone(engine)


def test_a_model_that_does_not_exist_ends_the_start_with_a_message(tmp_path: Path) -> None:
    failed = subprocess.run(
        [*MINT, "serve", "--port", "0", "--data", str(tmp_path), "--model", str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert failed.returncode == 1
    assert "nowhere" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--database", "mysql://u:geheim@h/x"], "must be PostgreSQL"),
        (["--checkpoints", "s3://key:geheim@bucket"], "AWS_ACCESS_KEY_ID"),
    ],
)
def test_a_place_that_cannot_be_used_ends_the_start_with_a_sentence(
    options: list[str], told: str, tmp_path: Path
) -> None:
    refused = CliRunner().invoke(app, ["serve", "--port", "0", "--data", str(tmp_path), *options])
    assert refused.exit_code == 1
    assert told in refused.output and "geheim" not in refused.output
