"""Kill it anywhere, resume, and nothing differs from the run that was never stopped."""

import json
import multiprocessing
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest

import mint.rl.rundir
from mint.errors import BadRequest
from mint.rl.resume import find_start, read_pending
from mint.rl.rundir import CheckpointRecord, RunDir, read_jsonl
from mint.rl.train import Config, StreamMinibatchConfig, train
from tests.rl.fake_service import Batches, FakeService, HalfDataset

fork = multiprocessing.get_context("fork")

VARIANTS = {
    "synchronous": {"save_every": 2},
    "asynchronous": {"save_every": 2, "max_lag": 2},
    "asynchronous, rarely saved": {"save_every": 4, "max_lag": 1, "rolling_save_every": 3},
    "streaming": {
        "save_every": 3,
        "max_lag": 1,
        "num_substeps": 2,
        "stream_minibatch_config": StreamMinibatchConfig(4, 2),
    },
    "dynamic sampling": {"save_every": 2, "max_lag": 1, "dynamic_sampling": 2, "remove_constant_reward_groups": True},
}


def make_config(folder: Path, **fields) -> Config:
    base = {
        "learning_rate": "linear 0.3 -> 0.1",
        "temperature": "linear 1.2 -> 0.8",
        "dataset_builder": HalfDataset(num_batches=5, groups_per_batch=4, group_size=3),
        "model_name": "bigram",
        "recipe_name": "test",
        "max_tokens": 2,
        "log_path": str(folder / "run"),
        "max_steps": 7,
        "eval_every": 3,
        "kl_penalty_coef": 0.05,
        "seed": 5,
        "loggers": (),
    }
    return Config(**(base | fields))


def in_a_process(folder: Path, fields: dict, kill_at: int | None = None) -> tuple[int, int]:
    """(exit code, events) of a run in a child of its own; with `kill_at`, killed at that event."""

    def work() -> None:
        service = FakeService(folder / "service", jitter=0.001, kill_at=kill_at)
        append = mint.rl.rundir.append_jsonl

        def append_and_tick(*args, **kwargs):
            service.clock.tick()
            append(*args, **kwargs)
            service.clock.tick()

        mint.rl.rundir.append_jsonl = append_and_tick
        train(make_config(folder, **fields), service)
        (folder / "final.pickle").write_bytes(pickle.dumps((service.trainer.table, service.trainer.moments)))
        (folder / "events").write_text(str(service.clock.events))

    child = fork.Process(target=work)
    child.start()
    child.join()
    done = folder / "events"
    return child.exitcode, int(done.read_text()) if done.is_file() else 0


def outcome(folder: Path) -> dict:
    """Everything about a run that must not depend on whether it was interrupted."""
    run = RunDir(folder / "run")
    metrics = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in run.metrics()]
    rollouts = {file.name: file.read_text() for file in sorted(run.rollouts_folder.iterdir())}
    checkpoints = {r.batch: (r.position, r.final) for r in run.checkpoints()}
    table, moments = pickle.loads((folder / "final.pickle").read_bytes())
    return {"metrics": metrics, "rollouts": rollouts, "checkpoints": checkpoints, "weights": (table, *moments)}


def assert_same(resumed: dict, unbroken: dict) -> None:
    assert resumed["metrics"] == unbroken["metrics"]
    assert resumed["rollouts"] == unbroken["rollouts"]
    assert resumed["checkpoints"] == unbroken["checkpoints"]
    for one, other in zip(resumed["weights"], unbroken["weights"], strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_killed_at_any_point_ends_as_if_it_had_not_been(tmp_path, variant):
    fields = VARIANTS[variant]
    code, events = in_a_process(tmp_path / "unbroken", fields)
    assert code == 0
    unbroken = outcome(tmp_path / "unbroken")
    points = sorted({*np.linspace(1, events - 1, 5).astype(int).tolist(), events - 1})
    for point in points:
        folder = tmp_path / f"killed-{point}"
        assert in_a_process(folder, fields, kill_at=point)[0] == -signal.SIGKILL
        assert in_a_process(folder, fields)[0] == 0
        assert_same(outcome(folder), unbroken)


def test_a_run_killed_again_and_again_still_ends_the_same(tmp_path):
    fields = VARIANTS["asynchronous"]
    assert in_a_process(tmp_path / "unbroken", fields)[0] == 0
    folder, kills = tmp_path / "killed", 0
    while in_a_process(folder, fields, kill_at=45)[0] != 0:
        kills += 1
        assert kills < 20, "no progress between kills"
    assert kills > 1
    assert_same(outcome(folder), outcome(tmp_path / "unbroken"))


def test_the_groups_trained_are_those_of_the_uninterrupted_run_whatever_the_lag(tmp_path):
    def trained(folder):
        run = RunDir(folder / "run")
        return sorted(
            (r.problem, r.step, tuple(r.completion_tokens)) for s in run.rollout_steps() for r in run.rollouts(s)
        )

    for lag in (0, 1, 3):
        fields = {"max_lag": lag, "save_every": 3}
        in_a_process(tmp_path / f"a{lag}", fields)
        in_a_process(tmp_path / f"b{lag}", fields, kill_at=50)
        in_a_process(tmp_path / f"b{lag}", fields)
        groups = trained(tmp_path / f"a{lag}")
        assert trained(tmp_path / f"b{lag}") == groups
        assert len(groups) == 7 * 4 * 3


def test_lines_torn_by_the_kill_do_no_harm(tmp_path):
    fields = VARIANTS["synchronous"]
    in_a_process(tmp_path / "unbroken", fields)
    folder = tmp_path / "killed"
    in_a_process(folder, fields, kill_at=60)
    run = RunDir(folder / "run")
    for file in (run.metrics_file, run.checkpoints_file, run.spans_file):
        with open(file, "a") as torn:
            torn.write('{"step": 5, "na')
    assert in_a_process(folder, fields)[0] == 0
    assert_same(outcome(folder), outcome(tmp_path / "unbroken"))


def test_pending_groups_come_back_bit_by_bit(tmp_path):
    service = FakeService(tmp_path / "service")
    config = make_config(tmp_path, max_lag=2, max_steps=5, save_every=2)
    run = train(config, service)
    records = {r.batch: r for r in run.checkpoints()}
    assert records[2].position == (4, 0) and records[4].position == (5, 0)
    assert records[4].pending == "pending/000004.jsonl" and records[5].pending is None
    assert not list(run.pending_folder.glob("*.jsonl")), "a checkpoint's pending groups go when the next one is there"


def test_a_checkpoint_whose_pending_groups_are_gone_is_refused(tmp_path):
    record = CheckpointRecord("000002", 2, "s", pending="pending/000002.jsonl")
    with pytest.raises(BadRequest, match=r"needs .*pending/000002.jsonl, which is gone"):
        read_pending(RunDir(tmp_path), record, Batches([]))


def test_a_finished_run_is_left_alone(tmp_path):
    config = make_config(tmp_path)
    train(config, FakeService(tmp_path / "service"))
    before = {p: p.read_bytes() for p in Path(config.log_path).rglob("*.jsonl")}
    service = FakeService(tmp_path / "service")
    train(config, service)
    assert not service.trainers
    assert {p: p.read_bytes() for p in Path(config.log_path).rglob("*.jsonl")} == before


def test_more_steps_continue_a_finished_run(tmp_path):
    train(make_config(tmp_path, max_steps=4), FakeService(tmp_path / "service"))
    run = train(make_config(tmp_path, max_steps=6), FakeService(tmp_path / "service"))
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4, 5, 6]
    assert [r.batch for r in run.checkpoints() if r.final] == [4, 6]


def test_other_settings_in_the_same_directory_are_refused_by_name(tmp_path):
    train(make_config(tmp_path, max_steps=2), FakeService(tmp_path / "service"))
    with pytest.raises(BadRequest, match=r"max_tokens=2, and now it is 3"):
        train(make_config(tmp_path, max_tokens=3), FakeService(tmp_path / "service"))
    with pytest.raises(BadRequest, match="dataset_builder"):
        train(make_config(tmp_path, dataset_builder=HalfDataset(num_batches=9)), FakeService(tmp_path / "service"))


def test_settings_that_do_not_touch_training_may_change(tmp_path):
    train(make_config(tmp_path, max_steps=2), FakeService(tmp_path / "service"))
    changed = make_config(tmp_path, max_steps=3, eval_every=1, save_every=1, rollout_json_export=False)
    assert find_start(RunDir(tmp_path / "run"), changed).batch == 2


def test_the_line_of_a_checkpoint_is_written_after_the_save(tmp_path):
    """Killed at every event around the second save, the last line always names a checkpoint that can be loaded."""
    fields = {"save_every": 2, "max_lag": 1}
    for point in range(40, 60, 2):
        folder = tmp_path / str(point)
        in_a_process(folder, fields, kill_at=point)
        service = FakeService(folder / "service")
        for line in read_jsonl(RunDir(folder / "run").checkpoints_file):
            assert service.load(line["state_path"]) is not None
            if line["pending"] and line["batch"] == RunDir(folder / "run").last_checkpoint().batch:
                assert (folder / "run" / line["pending"]).is_file()


def test_a_config_is_written_before_the_first_step_so_that_a_resume_can_compare(tmp_path):
    in_a_process(tmp_path, {}, kill_at=2)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["max_tokens"] == 2
