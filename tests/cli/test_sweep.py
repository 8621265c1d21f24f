"""`mint sweep`: every combination is a run, none is run twice, and what cannot be is told before the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mint.rl.rundir import RunDir
from tests.cli.conftest import invoke

SMALL = ("--groups-per-batch", "2", "--group-size", "2", "--tests", "4", "--loggers", "[]", "--max-steps", "1")


@pytest.fixture
def here(tiny_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a server to speak to."""
    monkeypatch.setenv("MINT_BASE_URL", tiny_server)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_combination_is_run_with_every_seed_and_the_best_comes_first(here: Path) -> None:
    words = ("sweep", "addition", *SMALL, "--over", "learning-rate=1e-4,1e-3", "--over", "max_tokens=3,5")
    code, text = invoke(*words, "--seeds", 2)
    assert code == 0, text
    runs = {path.name: RunDir(path) for path in (here / "sweeps" / "addition").iterdir()}
    assert len(runs) == 8
    for name, run in runs.items():
        wanted = dict(part.split("=") for part in name.split(" "))
        config = run.config()
        assert config is not None and run.last_checkpoint().final
        assert (config["learning_rate"], config["max_tokens"], config["seed"]) == (
            float(wanted["learning_rate"]), int(wanted["max_tokens"]), int(wanted["seed"]),
        )  # fmt: skip
    assert "learning_rate  max_tokens  before" in text and "Look at them: mint runs sweeps/addition" in text

    written = {name: run.metrics_file.stat().st_mtime_ns for name, run in runs.items()}
    code, text = invoke(*words, "--seeds", 2, "--json")
    assert code == 0, text
    told = json.loads(text)
    assert written == {name: run.metrics_file.stat().st_mtime_ns for name, run in runs.items()}, "nothing is run twice"
    means = [one["mean"] for one in told]
    assert means == sorted(means, reverse=True) and len(told) == 4
    for one in told:
        reached = [run["holdout"] for run in one["runs"]]
        assert (one["lowest"], one["highest"]) == (min(reached), max(reached))
        assert one["mean"] == pytest.approx(sum(reached) / 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which recipe?"),
        (("addition", "--over", "learning_rate"), "names no values"),
        (("addition", "--over", "learning_rate=1e-4,"), "names no values"),
        (("addition", "--over", "learning_rate=1e-4,1e-4"), "a value twice"),
        (("addition", "--over", "rank=1", "--over", "rank=2"), "rank twice"),
        (("addition", "--over", "seed=1,2"), "--seeds"),
        (("addition", "--over", "learning_rate=1e-4,fast"), "'fast' is not a schedule"),
        (("addition", "--over", "speed=1,2"), "'speed' is not a field"),
        (("no_such_recipe",), "no_such_recipe"),
    ],
)
def test_what_cannot_be_is_told_before_the_first_run(here: Path, words: tuple[str, ...], said: str) -> None:
    code, text = invoke("sweep", *words)
    assert code != 0 and said in text, text
    assert list(here.iterdir()) == []


def test_values_with_commas_stand_between_semicolons(here: Path) -> None:
    code, text = invoke(
        "sweep", "addition", *SMALL, "--over", "learning_rate=cosine 1e-3 -> 1e-4, warmup 2; 1e-4", "--out", "mine"
    )
    assert code == 0, text
    assert len(list((here / "mine").iterdir())) == 2
