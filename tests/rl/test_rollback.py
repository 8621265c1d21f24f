"""A run that breaks down goes back to its best checkpoint, once for every breakdown, and a resumed run knows."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mint.errors import BadRequest
from mint.rl.rollback import MOST_ROLLBACKS, breakdown, rollbacks
from mint.rl.rundir import CheckpointRecord, RunDir, read_jsonl
from mint.rl.train import Config, train
from tests.rl.fake_service import FakeService, HalfDataset, ServedTrainer
from tests.rl.test_doctor import a_finding


@dataclass(frozen=True)
class SteadyDataset(HalfDataset):
    """Few different prompts, so that what is learnt shows at once."""

    async def __call__(self):
        train_set, _ = await super().__call__()
        for batch in train_set.batches:
            batch[:] = [replace(builder, prompt="ab") for builder in batch]
        return train_set, None


def config(tmp_path: Path, **fields: object) -> Config:
    values: dict[str, object] = {"rollback": True, "doctor_every": 1, "save_every": 2} | fields
    return Config(
        learning_rate=0.1, dataset_builder=SteadyDataset(num_batches=24, groups_per_batch=8, group_size=8),
        model_name="fake", recipe_name="test", max_tokens=4, log_path=str(tmp_path / "run"), loggers=(), eval_every=0,
        **values,
    )  # fmt: skip


def break_policy_at(service: FakeService, step: int, times: int) -> None:
    """The optimizer's step number `step` ruins the policy, the first `times` it comes to it."""
    original, left = ServedTrainer.optim_step_async, [times]

    async def ruin(self, adam_params):
        result = await original(self, adam_params)
        if self.steps == step and left[0]:
            left[0] -= 1
            self.table[:, : self.table.shape[1] // 2] -= 20.0
        return result

    service.ruin = ruin


def test_a_ruined_run_goes_back_and_ends_well(tmp_path, monkeypatch):
    service = FakeService(tmp_path / "service")
    break_policy_at(service, 12, times=1)
    monkeypatch.setattr(ServedTrainer, "optim_step_async", service.ruin)
    run = train(config(tmp_path), service)
    lines = {line["step"]: line for line in run.metrics()}
    assert sorted(lines) == list(range(24)) and rollbacks(run) == 1
    assert lines[23]["env/all/reward/total"] > 0.55
    back = next(line for line in read_jsonl(run.health_file) if "rollback" in line)
    assert back["rollback"] == "000010" and back["because"]["kind"] == "reward_fell"
    assert lines[9]["optim/lr"] == 0.1 and lines[23]["optim/lr"] == 0.05
    assert [record.batch for record in run.checkpoints()].count(int(back["rollback"])) == 2


def test_a_run_ruined_before_its_first_checkpoint_begins_again(tmp_path, monkeypatch):
    service = FakeService(tmp_path / "service")
    break_policy_at(service, 2, times=1)
    monkeypatch.setattr(ServedTrainer, "optim_step_async", service.ruin)
    run = train(config(tmp_path, save_every=20), service)
    back = [line["rollback"] for line in read_jsonl(run.health_file) if "rollback" in line]
    assert back == ["000000"]
    lines = {line["step"]: line for line in run.metrics()}
    assert sorted(lines) == list(range(24)) and {line["optim/lr"] for line in lines.values()} == {0.05}
    assert lines[23]["env/all/reward/total"] > 0.55


def test_without_the_field_a_ruined_run_goes_on(tmp_path, monkeypatch):
    service = FakeService(tmp_path / "service")
    break_policy_at(service, 12, times=1)
    monkeypatch.setattr(ServedTrainer, "optim_step_async", service.ruin)
    run = train(config(tmp_path, rollback=False), service)
    assert rollbacks(run) == 0 and "reward_fell" in {line["kind"] for line in read_jsonl(run.health_file)}
    assert run.metrics()[-1]["optim/lr"] == 0.1


def test_it_gives_up_after_three(tmp_path, monkeypatch):
    service = FakeService(tmp_path / "service")
    break_policy_at(service, 12, times=100)
    monkeypatch.setattr(ServedTrainer, "optim_step_async", service.ruin)
    run = train(config(tmp_path), service)
    assert rollbacks(run) == MOST_ROLLBACKS and len(run.metrics()) == 24


def test_there_must_be_something_better_to_go_back_to(tmp_path):
    run = RunDir(tmp_path)
    for step in range(8):
        run.append_metrics(step, {"env/all/reward/total": 0.1 * step})
    run.append_checkpoint(CheckpointRecord("000004", 4, "state"))
    fell = a_finding("reward_fell")
    assert breakdown(run, [fell]) is None
    run.append_metrics(8, {"env/all/reward/total": -9.0})
    assert breakdown(run, [fell]).checkpoint.name == "000004"
    assert breakdown(run, [a_finding("all_wrong"), a_finding("reward_fell", severity="warning")]) is None


@pytest.mark.parametrize("fields", [{"max_lag": 1}, {"doctor_every": 0}, {"save_every": 0}])
def test_what_rollback_needs_is_asked_for(tmp_path, fields):
    with pytest.raises(BadRequest, match="rollback needs"):
        config(tmp_path, **fields)
