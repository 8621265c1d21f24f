"""The command as a whole: light help, verbs that exist, errors in two lines, statuses that mean something."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mint import errors
from mint.cli.app import load
from mint.cli.failures import Code, Failure, explain
from mint.cli.verbs import VERBS
from tests.cli.conftest import invoke
from tests.rl.conftest import ROOT

HEAVY = {"torch", "transformers", "fastapi", "uvicorn", "sqlalchemy", "numpy", "httpx", "nicegui", "asyncio"}


def loaded_by(*arguments: str) -> set[str]:
    """Heavy modules in memory after `mint <arguments>`."""
    code = (
        "import sys\n"
        "from mint.cli.__main__ import main\n"
        f"sys.argv = ['mint', *{list(arguments)!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print(' '.join(sorted({HEAVY!r} & set(sys.modules))), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stderr.split())


def test_help_lists_every_verb_and_loads_nothing_heavy() -> None:
    assert loaded_by("--help") == set()
    code, text = invoke("--help")
    assert code == 0 and all(f" {verb} " in text for verb in VERBS)


def test_help_of_every_verb_works_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from mint.cli.__main__ import app\n"
        "from mint.cli.verbs import VERBS\n"
        "for verb in VERBS:\n"
        "    shown = CliRunner().invoke(app, [verb, '--help'])\n"
        "    assert shown.exit_code == 0 and 'Usage: mint ' + verb in shown.output, shown.output\n"
        f"print(sorted({HEAVY - {'asyncio'}!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_of_the_table_is_there_and_documented(verb: str) -> None:
    assert load(verb, VERBS[verb]).name == verb
    assert f"`mint {verb}" in (ROOT / "docs" / "cli.md").read_text()


def test_without_a_verb_help_is_shown() -> None:
    assert invoke() == invoke("--help")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["docter"], "Did you mean 'doctor'?"),
        (["runs", "--jso"], "--json"),
        (["bench", "--tokens", "many"], "'--tokens'"),
        (["runs", "nowhere"], "there is no folder nowhere"),
        (["train", "additon"], "did you mean 'addition'?"),
        (["train", "addition", "--lerning-rate", "1"], "did you mean --learning-rate?"),
        (["train", "addition", "--preset", "dappo"], "did you mean 'dapo'?"),
        (["train", "none.toml"], "there is no file none.toml"),
        (["train", "."], ". is a folder"),
        (["show"], "there are no runs in ./runs yet"),
        (["show", "--group", "1"], "a group is in a step"),
        (["chat", "-p", "hi", "--base-url", "http://127.0.0.1:9"], "no connection to http://127.0.0.1:9"),
    ],
)
def test_a_newcomers_mistake_is_answered_in_two_lines(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if words == ["show", "--group", "1"]:
        (tmp_path / "runs" / "one").mkdir(parents=True)
        (tmp_path / "runs" / "one" / "config.json").write_text("{}")
    code, text = invoke(*words)
    lines = [line for line in text.splitlines() if "Trying again" not in line]
    assert code in (Code.USAGE, Code.NOT_FOUND, Code.UNREACHABLE), text
    assert len(lines) == 2 and said in lines[0] and lines[0].startswith("mint") and lines[1].startswith("    "), text


def test_a_traceback_is_shown_when_asked_for_wherever_the_word_stands(tmp_path: Path) -> None:
    assert "Traceback" not in invoke("runs", tmp_path / "none")[1]
    for words in (["--traceback", "runs", tmp_path / "none"], ["runs", tmp_path / "none", "--traceback"]):
        code, text = invoke(*words)
        assert code == Code.NOT_FOUND and "Traceback (most recent call last)" in text and "Failure" in text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BadRequest("x"), Code.USAGE),
        (errors.NotFound("x"), Code.NOT_FOUND),
        (errors.Gone("x"), Code.NOT_FOUND),
        (errors.ConnectionFailed("x"), Code.UNREACHABLE),
        (errors.TimedOut("x"), Code.UNREACHABLE),
        (errors.Unauthorized("x"), Code.REFUSED),
        (errors.Forbidden("x"), Code.REFUSED),
        (errors.Busy("x"), Code.REFUSED),
        (errors.Internal("x"), Code.FAULT),
        (KeyError("x"), Code.FAULT),
        (Failure("x", "y", Code.ALARM), Code.ALARM),
    ],
)
def test_every_kind_of_error_has_its_status(error: Exception, code: Code) -> None:
    assert explain(error, "mint")[2] == code


def test_the_statuses_are_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == {int(code) for code in Code}


def test_the_shell_completes_verbs_and_runs(tmp_path: Path) -> None:
    def completed(line: str) -> set[str]:
        environment = os.environ | {"_MINT_COMPLETE": "complete_bash", "COMP_WORDS": line}
        environment["COMP_CWORD"] = str(len(line.split()) - (not line.endswith(" ")))
        command = [sys.executable, "-c", "from mint.cli.__main__ import main; main()"]
        environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        return set(done.stdout.split())

    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.json").write_text("{}")
    assert completed("mint do") == {"doctor"}
    assert completed("mint doctor ru") == {"runs/first"}
    assert completed("mint train ad") == {"addition"}


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = invoke("serve", "--port", port)
    assert code == Code.USAGE and f"cannot listen on 127.0.0.1:{port}" in text and f"--port {port + 1}" in text


def test_info_says_what_there_is_and_how_to_get_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mint.cli.info.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    code, text = invoke("info", "--json")
    facts = json.loads(text)
    assert code == 0 and facts["torch"].startswith("2.") and "float" in facts["device"]
    missing = {one["what"]: one["get"] for one in facts["missing"]}
    assert missing["matplotlib"] == "pip install 'mint-rl[plots]'" and "bubblewrap" in missing["bubblewrap"]
    assert invoke("info")[0] == 0
