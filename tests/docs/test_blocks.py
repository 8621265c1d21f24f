"""Every code block of the README and the documentation runs, or says in its first line why it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import invoke
from tests.docs.blocks import RUN, SHOWN, SMALL, Block, blocks, commands
from tests.rl.conftest import ROOT

ELSEWHERE = {"prompting.md"}  # run by tests/demos/test_docs.py, which also reads what it prints
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.name not in ELSEWHERE and blocks(page)]
ALARM_IS_FINE = 1
"""Status of `mint doctor` when it found something, which a run of two steps may well deserve."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tiny_server: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINT_BASE_URL", tiny_server)
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))
    _make_mint(tmp_path / "bin", monkeypatch)
    names: dict[str, object] = {"__name__": "block"}
    for block in blocks(page):
        if block.title and "/" not in block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.excused or block.language in SHOWN:
            continue
        elif block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
        elif block.language == "sh":
            _run_shell(block, tmp_path)
        else:
            pytest.fail(f"{block}: a block of {block.language!r}; use one of {', '.join((*RUN, *SHOWN))}.")


def _run_shell(block: Block, folder: Path) -> None:
    together = commands(block)
    if together is None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}: {block.text}\n{done.stdout}\n{done.stderr}"
        return
    for words in together:  # in this process: a new one would spend seconds on imports
        code, text = invoke(*words)
        assert code == 0 or (words[0] == "doctor" and code == ALARM_IS_FINE), f"{block}: mint {words}: {text}"


def _make_mint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mint` and `python` as the shell finds them in an installation."""
    folder.mkdir()
    for name, words in {"mint": "-m mint.cli", "python": ""}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_a_block_that_is_not_run_says_why(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\n# not run in the tests: needs another machine\nmint serve\n```\n\n```sh\nmint serve\n```\n")
    assert [block.excused for block in blocks(page)] == [True, False]


def test_lines_that_only_call_mint_are_told_apart_from_shell() -> None:
    def of(text: str) -> list[list[str]] | None:
        return commands(Block(Path("p.md"), 1, "sh", None, text))

    assert of("mint runs   # all\nmint show a \\\n  --x 'b c'\n") == [["runs"], ["show", "a", "--x", "b c"]]
    assert of("mint quickstart\n") == [["quickstart", "--steps", "2"]]
    assert of("mint train x --max-steps 3\n") == [["train", "x", "--max-steps", "3", *SMALL]]
    assert of("mint runs | tail\n") is None and of("python x.py\n") is None and of("mint doctor || true\n") is None
