"""tinker-cookbook's own recipes, unmodified, for two steps on model folders that lie below the working directory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat import workspace
from tests.compat.environments import python_of
from tests.compat.serving import Served, bare_environment, mint_serve

CLIENT = "tinker-cookbook 0.5.8"
TIME_LIMIT = 240

Rows = list[dict[str, Any]]


class Cookbook:
    def __init__(self, served: Served, python: Path) -> None:
        self._served = served
        self._python = python

    def run(self, recipe: str, log: Path, *options: str) -> tuple[Rows, Rows]:
        """Runs a recipe as its users do; gives what it logged of each step, and its checkpoints."""
        command = [self._python, "-m", f"tinker_cookbook.recipes.{recipe}", f"log_path={log}", "lora_rank=4", *options]
        address = {"TINKER_BASE_URL": self._served.url, "TINKER_API_KEY": self._served.key}
        done = subprocess.run(
            command,
            cwd=self._served.folder,
            env=bare_environment(self._served.folder, address),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\nserver: {self._served.log.read_text()}"
        return rows_of(log / "metrics.jsonl"), rows_of(log / "checkpoints.jsonl")


def rows_of(file: Path) -> Rows:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory: pytest.TempPathFactory, environment: Callable[[str], Path]) -> Iterator[Cookbook]:
    folder = tmp_path_factory.mktemp("cookbook")
    workspace.fill(folder)
    with mint_serve(folder, workspace.MODELS) as served:
        yield Cookbook(served, python_of(environment("tinker-0.36")))


SL_LOOP = (f"model_name={workspace.BOXED}", "batch_size=4", "max_length=512", "max_steps=2", "save_every=1")
ARITHMETIC = (
    "env=arithmetic",
    f"model_name={workspace.ADDS}",
    "groups_per_batch=8",
    "group_size=8",
    "max_tokens=16",
    "max_steps=2",
    "eval_every=0",
    "save_every=1",
    "learning_rate=1e-3",
)


def test_sl_loop_trains_and_resumes_where_it_was_stopped(cookbook: Cookbook, tmp_path: Path) -> None:
    """Two steps; then, as if the process had died after the first, the second step once more and the same."""
    steps, checkpoints = cookbook.run("sl_loop", tmp_path / "log", *SL_LOOP)
    assert [row["step"] for row in steps] == [0, 1]
    assert [row["name"] for row in checkpoints] == ["000001", "final"]

    (tmp_path / "log" / "checkpoints.jsonl").write_text(json.dumps(checkpoints[0]) + "\n")
    (tmp_path / "log" / "metrics.jsonl").unlink()
    (again,), _ = cookbook.run("sl_loop", tmp_path / "log", *SL_LOOP)
    assert again["step"] == 1
    assert again["train_mean_nll"] == pytest.approx(steps[1]["train_mean_nll"], rel=1e-6)
    assert again["optim/grad_norm"] == pytest.approx(steps[1]["optim/grad_norm"], rel=1e-4)


def test_rl_loop_samples_scores_and_trains(cookbook: Cookbook, tmp_path: Path) -> None:
    """Groups of eight, graded by the recipe's own reward, importance sampling."""
    model = f"model_name={workspace.BOXED}"
    sizes = ("batch_size=4", "group_size=8", "max_tokens=96", "max_steps=2", "save_every=1")
    steps, checkpoints = cookbook.run("rl_loop", tmp_path / "log", model, *sizes)
    assert [row["step"] for row in steps] == [0, 1]
    assert all(0 < row["reward/total"] < 1 and row["optim/grad_norm"] > 0 for row in steps)
    assert checkpoints[-1]["sampler_path"].startswith("tinker://")


def test_math_rl_trains_on_arithmetic_with_log_probs_that_agree(cookbook: Cookbook, tmp_path: Path) -> None:
    """The cookbook's full training loop; its own measure of sampler against trainer is zero."""
    steps, checkpoints = cookbook.run("math_rl.train", tmp_path / "log", *ARITHMETIC, "compute_post_kl=True")
    assert [row["step"] for row in steps] == [0, 1]
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-5 for row in steps)
    assert all(abs(row["optim/kl_sample_train_v2"]) < 1e-5 for row in steps)
    assert steps[0]["kl_pre_post_v2"] > 0
    assert [row["name"] for row in checkpoints] == ["000001", "000002", "final"]


def test_math_rl_trains_off_policy(cookbook: Cookbook, tmp_path: Path) -> None:
    """Sampling and training at the same time, one step apart at most, with ppo."""
    steps, _ = cookbook.run("math_rl.train", tmp_path / "log", *ARITHMETIC, "max_steps_off_policy=1", "loss_fn=ppo")
    assert {row["step"] for row in steps} == {0, 1}
    assert any(row.get("optim/grad_norm", 0) > 0 for row in steps)
