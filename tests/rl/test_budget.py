"""A budget stops a run at the end of a step, saved; a larger one goes on from there as if it had never stopped."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mint.errors import BadRequest, BudgetReached
from mint.rl.budget import Spent
from mint.rl.config import Config
from mint.rl.preview import preview
from mint.rl.rundir import RunDir
from mint.rl.train import train
from tests.rl.fake_service import FakeService, HalfDataset


def config(folder: Path, **fields: object) -> Config:
    return Config(
        learning_rate=0.3, dataset_builder=HalfDataset(num_batches=8, tests=4), model_name="fake", recipe_name="test",
        max_tokens=2, log_path=str(folder / "run"), loggers=(), eval_every=3, save_every=0, **fields,
    )  # fmt: skip


def tokens_of(run_dir: RunDir) -> list[int]:
    """By hand, from what the rollouts and the updates say."""
    names = ("total_ac_tokens", "total_ob_tokens")
    return [
        round(
            line.get("train/tokens", 0)
            + sum(line.get(f"{part}env/all/{name}", 0) for part in ("", "test/") for name in names)
        )
        for line in run_dir.metrics()
    ]


def test_a_run_stops_at_its_budget_and_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    quiet = train(config(tmp_path / "quiet"), FakeService(tmp_path / "quiet"))
    spent = tokens_of(quiet)
    service = FakeService(tmp_path / "stopped")
    budget = sum(spent[:3]) - 1
    with pytest.raises(BudgetReached, match="budget_tokens") as stopped:
        train(config(tmp_path, budget_tokens=budget), service)
    assert f"{sum(spent[:3]):,} tokens" in str(stopped.value)
    assert "after 3 of 8 steps" in str(stopped.value)
    run_dir = RunDir(tmp_path / "run")
    assert run_dir.last_checkpoint().batch == 3
    with pytest.raises(BudgetReached, match="after 3 of 8 steps"):
        train(config(tmp_path, budget_tokens=budget), service)
    resumed = train(config(tmp_path, budget_tokens=10**9), service)
    assert tokens_of(resumed) == spent
    rewards = [[line.get("env/all/reward/total") for line in run.metrics()] for run in (quiet, resumed)]
    assert rewards[0] == rewards[1]


def test_seconds_are_a_budget_too(tmp_path: Path) -> None:
    with pytest.raises(BudgetReached, match="budget_seconds is 1e-06"):
        train(config(tmp_path, budget_seconds=1e-6), FakeService(tmp_path / "service"))


def test_a_budget_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="budget_tokens is 0"):
        config(tmp_path, budget_tokens=0)


def test_the_preview_says_how_far_the_budget_goes(tmp_path: Path) -> None:
    plain = config(tmp_path)
    whole = asyncio.run(preview(plain, FakeService(tmp_path / "a")))
    assert whole.enough_for is None
    assert "budget" not in str(whole)
    used = Spent.in_all(train(plain, FakeService(tmp_path / "b")).metrics())
    half = asyncio.run(preview(replace(plain, budget_tokens=used.tokens // 2), FakeService(tmp_path / "c")))
    assert half.enough_for in (3, 4, 5)
    assert f"enough for about {half.enough_for} of the steps" in str(half)
