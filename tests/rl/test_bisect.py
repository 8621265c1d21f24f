"""Bisection finds the planted checkpoint in ceil(log2 n) evaluations; checkpoints are measured as the run measured."""

import asyncio
import math
from pathlib import Path

import pytest

from mint.errors import BadRequest
from mint.rl.bisect import Verdict, bisect, first_true
from mint.rl.recheck import CheckpointEvaluator, find_checkpoints, load_config
from mint.rl.rundir import CheckpointRecord, RunDir
from mint.rl.strategies import RetryOnFailure
from mint.rl.train import Config, train
from tests.rl.fake_service import FakeService, HalfDataset


def checkpoints(count: int) -> list[CheckpointRecord]:
    return [CheckpointRecord(f"{i:03d}", i, f"state {i}", f"sampler {i}") for i in range(count)]


def search(values: list[float], **options: object) -> tuple[Verdict, list[int]]:
    asked: list[int] = []

    async def measure(record: CheckpointRecord) -> float:
        asked.append(record.batch)
        return values[record.batch]

    return asyncio.run(bisect(checkpoints(len(values)), measure, **options)), asked


@pytest.mark.parametrize("count", [2, 3, 8, 9, 100])
def test_every_planted_checkpoint_is_found_in_log2_n_evaluations(count):
    for bad in range(count):
        verdict, asked = search([0.8] * bad + [0.2] * (count - bad), limit=0.5)
        assert verdict.first_bad.batch == bad and len(asked) <= math.ceil(math.log2(count))
        assert len(asked) == len(set(asked))
        assert (verdict.last_good.batch if verdict.last_good else -1) == bad - 1


def test_without_a_limit_it_is_half_way_between_the_ends():
    verdict, asked = search([0.9, 0.85, 0.8, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1])
    assert verdict.limit == pytest.approx(0.5) and verdict.first_bad.batch == 3
    assert len(asked) == 2 + math.ceil(math.log2(8)) and list(verdict.measured) == sorted(verdict.measured)


def test_a_loss_is_better_when_lower():
    assert search([1.0, 1.1, 2.9, 3.0], lower_is_better=True)[0].first_bad.batch == 2


def test_a_run_that_did_not_get_worse_has_no_bad_checkpoint():
    with pytest.raises(BadRequest, match="did not get worse"):
        search([0.2, 0.5, 0.9])
    with pytest.raises(BadRequest, match="needs two"):
        search([0.2])


def test_a_search_over_one_candidate_asks_nothing():
    async def never(index: int) -> bool:
        raise AssertionError

    assert asyncio.run(first_true(4, 4, never)) == 4


# --------------------------------------------------------------------------------------------------------------------
# Measuring checkpoints


def fake_config(tmp_path: Path, **fields: object) -> Config:
    return Config(
        learning_rate=0.05, dataset_builder=HalfDataset(tests=4), model_name="fake", recipe_name="test", max_tokens=4,
        log_path=str(tmp_path / "run"), loggers=(), eval_every=2, save_every=2, **fields,
    )  # fmt: skip


def test_a_checkpoint_measures_what_the_run_measured(tmp_path):
    service = FakeService(tmp_path / "service")
    run = train(fake_config(tmp_path), service)
    records = find_checkpoints(run)
    assert [record.batch for record in records] == [2, 4, 6]
    evaluator = CheckpointEvaluator(load_config(run), service)
    logged = {line["step"]: line for line in run.metrics()}
    for record in records:
        metrics = asyncio.run(evaluator(record))
        assert metrics["test/env/all/reward/total"] == logged[record.batch]["test/env/all/reward/total"]
    with pytest.raises(BadRequest, match="no metric 'accuracy'"):
        asyncio.run(evaluator.metric(records[0], "accuracy"))


RECIPE = """
from mint.rl.strategies import RetryOnFailure
from mint.rl.train import Config
from tests.rl.fake_service import HalfDataset
MINE = Config(learning_rate=1.0, dataset_builder=HalfDataset(tests={tests}), model_name="m", recipe_name="r",
              max_tokens=99, log_path="elsewhere", rollout_error_tolerance=RetryOnFailure(2))
"""


def test_what_values_cannot_say_comes_from_the_recipe(tmp_path):
    run = train(fake_config(tmp_path, rollout_error_tolerance=RetryOnFailure(2)), FakeService(tmp_path / "service"))
    with pytest.raises(BadRequest, match="rollout_error_tolerance of this run is code"):
        load_config(run)
    recipe = tmp_path / "my_recipe.py"
    recipe.write_text(RECIPE.format(tests=0))
    config = load_config(run, f"{recipe}:MINE")
    assert config.dataset_builder == HalfDataset(tests=4) and config.max_tokens == 4
    assert config.rollout_error_tolerance == RetryOnFailure(2)
    assert load_config(run, str(recipe)) == config
    with pytest.raises(BadRequest, match="does not name one"):
        load_config(run, f"{recipe}:OTHER")


def test_another_dataset_is_refused(tmp_path):
    run = train(fake_config(tmp_path), FakeService(tmp_path / "service"))
    recipe = tmp_path / "other_recipe.py"
    recipe.write_text(RECIPE.format(tests=0).replace("HalfDataset", "OtherDataset").replace(
        "from tests.rl.fake_service import OtherDataset",
        "from tests.rl.fake_service import HalfDataset\nclass OtherDataset(HalfDataset): pass",
    ))  # fmt: skip
    with pytest.raises(BadRequest, match="another dataset than the run had"):
        load_config(run, str(recipe))


def test_a_missing_file_is_told(tmp_path):
    run = train(fake_config(tmp_path), FakeService(tmp_path / "service"))
    saved = run.config()
    run.write_config(saved | {"dataset_source": str(tmp_path / "gone.py")})
    with pytest.raises(BadRequest, match=r"gone\.py is not a file"):
        load_config(run)
    run.write_config(saved | {"dataset_source": None})
    with pytest.raises(BadRequest, match="does not say where"):
        load_config(run)
    run.write_config(saved | {"dataset_builder": saved["dataset_builder"] | {"type": "Vanished"}})
    with pytest.raises(BadRequest, match="has no Vanished any more"):
        load_config(run)


def test_a_run_without_checkpoints_says_so(tmp_path):
    with pytest.raises(BadRequest, match="no checkpoint to sample from"):
        find_checkpoints(RunDir(tmp_path))
