"""`mint train` and the verbs around a server, on the bundled model: it learns offline, stops on Ctrl-C, and goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mint.cli.failures import Code
from mint.recipes import RECIPES
from mint.rl.rundir import RunDir
from tests.cli.conftest import invoke
from tests.waiting import PATIENCE

SMALL = ("--groups-per-batch", "4", "--group-size", "2", "--tests", "4", "--loggers", "[]")


@pytest.fixture
def here(tiny_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a server to speak to."""
    monkeypatch.setenv("MINT_BASE_URL", tiny_server)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_on_the_bundled_model(recipe: str, here: Path) -> None:
    code, text = invoke("train", recipe, *SMALL, "--max-steps", 2, "--eval-every", 0)
    run = RunDir(here / "runs" / recipe)
    assert code == 0, text
    assert f"Look at it: mint show runs/{recipe}" in text
    assert [line["step"] for line in run.metrics()] == [0, 1] and run.last_checkpoint().final


def test_the_starting_point_trains_with_its_kl_term_at_work(here: Path) -> None:
    words = ("--preset", "starting_point", "--groups-per-batch", 4, "--tests", 4, "--max-steps", 2, "--loggers", "[]")
    code, text = invoke("train", "addition", *words)
    assert code == 0, text
    config, lines = RunDir("runs/addition").config(), RunDir("runs/addition").metrics()
    assert (config["learning_rate"], config["kl_penalty_coef"], config["dataset_builder"]["group_size"]) == (
        1e-5,
        0.05,
        4,
    )
    assert all("kl_policy_base" in line for line in lines[:2])
    # After one step the policy is no longer the base model, so the term is in the advantages of the second.
    sent = [r for r in RunDir("runs/addition").rollouts(1) if r.advantages]
    assert any(value != r.advantage for r in sent for value, ours in zip(r.advantages, r.mask, strict=True) if ours)


def test_a_dry_run_shows_settings_and_cost_and_leaves_nothing(here: Path) -> None:
    code, text = invoke("train", "addition", *SMALL, "--lora-rank", 4, "--dry-run", "--json")
    assert code == 0, text
    told = json.loads(text)
    assert told["config"]["lora_rank"] == 4 and told["estimate"]["steps"] == 20 and told["estimate"]["seconds"] > 0
    assert list(here.iterdir()) == []
    code, text = invoke("train", "addition", *SMALL, "--max-steps", 2, "--dry-run")
    assert code == 0 and "just run it" in text and "option" in text


def test_ctrl_c_saves_and_says_how_to_go_on_and_that_works(here: Path) -> None:
    words = ["train", "addition", *SMALL[:-2], "--num-batches", "2000", "--save-every", "0", "--eval-every", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mint.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Step 2:"):
            process.send_signal(signal.SIGINT)
            break
    _, said = process.communicate(timeout=2 * PATIENCE)
    run = RunDir("runs/addition")
    saved = run.last_checkpoint()
    assert process.returncode == Code.INTERRUPTED and saved is not None and 3 <= saved.batch < 2000, said
    assert f"Stopped after step {saved.batch}; everything up to there is saved." in said
    assert f"To go on: mint {' '.join(words)}" in said and "Traceback" not in said
    before = [record.completion_tokens for record in run.rollouts(0)]

    code, text = invoke("train", "runs/addition", "--max-steps", saved.batch + 1, "--loggers", "[]")
    assert code == 0, text
    assert [line["step"] for line in run.metrics()] == list(range(saved.batch + 1))
    assert [record.completion_tokens for record in run.rollouts(0)] == before
    assert run.last_checkpoint().batch == saved.batch + 1
    code, text = invoke("train", "addition", *SMALL, "--num-batches", 2000, "--lora-rank", 4, "--max-steps", 9)
    assert code == Code.USAGE and "holds a run with lora_rank=16" in text


def test_the_quickstart_learns_and_leaves_a_page_to_look_at(here: Path) -> None:
    code, text = invoke("quickstart", "--steps", 2)
    assert code == 0, text
    [folder] = (here / "runs").iterdir()
    assert (folder / "report.html").is_file() and "holdout 0." in text and "mint show" in text
    code, text = invoke("eval", folder)
    assert code == 0 and "000002  test/env/all/reward/total = " in text
    code, text = invoke("chat", folder, "--plain", "-p", "Q: What is 1 + 1?\\nA:", "--temperature", 0)
    assert code == 0 and text.strip()

    path = RunDir(folder).last_checkpoint().sampler_path
    code, text = invoke("checkpoints", "list", "--server", "--json")
    assert code == 0 and path in [one["path"] for one in json.loads(text)]
    code, text = invoke("checkpoints", "download", path, "--out", here / "fetched")
    assert code == 0 and list((here / "fetched").rglob("adapter_model.safetensors"))
    code, text = invoke("checkpoints", "download", path, "--out", here / "fetched")
    assert code == Code.USAGE and "not empty" in text
    assert invoke("checkpoints", "delete", path, "--yes") == (0, f"deleted {path}\n")
    code, text = invoke("checkpoints", "delete", path, "--yes")
    assert code == Code.NOT_FOUND and path in text


def test_models_of_a_server_and_of_this_machine(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, text = invoke("models", "--json")
    assert code == 0 and [one["name"] for one in json.loads(text)] == ["mint/tiny"]
    monkeypatch.delenv("MINT_BASE_URL")
    cached = tmp_path / "models--some--model" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text('{"max_position_embeddings": 99}')
    (cached / "model.safetensors").write_bytes(b"")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, text = invoke("models", "--json")
    assert [(one["name"], one["context"]) for one in json.loads(text)] == [("mint/tiny", 1024), ("some/model", 99)]


def test_chat_needs_a_model_that_is_there(here: Path) -> None:
    code, text = invoke("chat", "no/such", "-p", "hi")
    assert code == Code.USAGE and "no/such" in text and "mint/tiny" in text


def test_bench_ends_with_a_line_of_json(here: Path) -> None:
    code, text = invoke("bench", "--sequences", 2, "--tokens", 4, "--repeat", 1)
    told = json.loads(text.splitlines()[-1])
    assert code == 0 and told["model"] == "mint/tiny" and told["trained tokens/s"] > 0
    assert told["first token of a new policy, ms"] > 0
