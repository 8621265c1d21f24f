"""The preview of a run: its tokens are right where they are known, and the run itself is left alone."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mint.errors import BadRequest
from mint.rl.preview import PILOT_STEPS, preview
from mint.rl.train import Config, train
from tests.rl.fake_service import FakeService, HalfDataset


def config(tmp_path: Path, **fields: object) -> Config:
    return Config(
        learning_rate=0.05, dataset_builder=HalfDataset(num_batches=12, tests=4), model_name="fake", recipe_name="test",
        max_tokens=4, log_path=str(tmp_path / "run"), loggers=(), eval_every=5, save_every=0, **fields,
    )  # fmt: skip


def test_tokens_are_predicted_as_they_come(tmp_path):
    predicted = asyncio.run(preview(config(tmp_path), FakeService(tmp_path / "pilot")))
    assert not (tmp_path / "run").exists()
    lines = train(config(tmp_path), FakeService(tmp_path / "service")).metrics()
    counted = {
        name: sum(line.get(f"{prefix}env/all/{name}", 0) for line in lines for prefix in ("", "test/"))
        for name in ("total_ac_tokens", "total_ob_tokens")
    }
    assert predicted.steps == 12 and predicted.evaluations == 4 == sum("test/env/all/total_turns" in x for x in lines)
    assert predicted.prompt_tokens == counted["total_ob_tokens"]
    assert predicted.sampled_tokens == pytest.approx(counted["total_ac_tokens"], rel=0.2)
    assert predicted.seconds > 0 and (predicted.memory_bytes is None or predicted.memory_bytes > 2**20)
    assert "12 steps and 4 evaluations" in str(predicted)


def test_a_run_without_evaluations_is_previewed_without(tmp_path):
    predicted = asyncio.run(preview(replace(config(tmp_path), eval_every=0), FakeService(tmp_path / "pilot")))
    assert predicted.evaluations == 0


def test_a_run_no_longer_than_its_pilot_is_not_worth_one(tmp_path):
    with pytest.raises(BadRequest, match="just run it"):
        asyncio.run(preview(config(tmp_path, max_steps=PILOT_STEPS), FakeService(tmp_path / "pilot")))
