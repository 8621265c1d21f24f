"""The loop on a real server and a real, if tiny, language model: it learns, and survives being killed."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from mint.rl.algorithms import STARTING_GROUP_SIZE, get_algorithm
from mint.rl.rundir import RunDir
from mint.rl.train import Config, train
from tests.rl.conftest import ROOT

KILLED = """
import os, signal, sys
import mint.rl.rundir
from tests.rl.test_train_on_tiny import small_config
from mint.rl.train import train

write = mint.rl.rundir.RunDir.append_metrics
def write_or_die(self, step, metrics):
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, step, metrics)
mint.rl.rundir.RunDir.append_metrics = write_or_die
train(small_config(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def addition_config(address: str, log_path: str | Path, **fields: object) -> Config:
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        from math_rl import DEFAULT, AdditionDatasetBuilder
    finally:
        sys.path.remove(str(ROOT / "recipes"))
    sizes = {name: fields.pop(name) for name in ("groups_per_batch", "group_size", "num_batches", "tests")}
    builder = AdditionDatasetBuilder(**sizes)
    return replace(DEFAULT, base_url=address, log_path=str(log_path), dataset_builder=builder, loggers=(), **fields)


def small_config(address: str, log_path: str | Path, lag: int) -> Config:
    return addition_config(
        address, log_path, groups_per_batch=4, group_size=4, num_batches=5, tests=6, max_lag=lag, save_every=2,
        eval_every=3, kl_penalty_coef=0.05,
    )  # fmt: skip


def trained_on(run: RunDir) -> list[list[dict[str, object]]]:
    """By step, what each rollout was, to the last bit of its log-probs, the sampler's and the trainer's."""
    return [[asdict(record) for record in run.rollouts(step)] for step in run.rollout_steps()]


def measured(run: RunDir) -> list[dict[str, float]]:
    """Every metric of every step but how long things took."""
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in run.metrics()]


def test_reward_rises_on_problems_never_trained_on(tiny_server, tmp_path):
    config = addition_config(
        tiny_server, tmp_path, groups_per_batch=8, group_size=8, num_batches=8, tests=48, eval_every=8,
        learning_rate=2e-3, kl_penalty_coef=0.01,
    )  # fmt: skip
    lines = train(config).metrics()
    tested = [line["test/env/all/reward/total"] for line in lines if "test/env/all/reward/total" in line]
    assert len(tested) == 2 and tested[1] > tested[0] + 0.1
    assert np.mean([line["env/all/reward/total"] for line in lines[6:8]]) > lines[0]["env/all/reward/total"] + 0.1
    assert lines[0]["kl_policy_base"] == pytest.approx(0, abs=1e-5) and lines[7]["kl_policy_base"] > 0.005
    assert max(line["optim/kl_sample_train_max"] for line in lines[:8]) < 1e-3


def test_the_starting_point_runs_with_its_kl_term_in_the_advantages(tiny_server, tmp_path):
    config = addition_config(
        tiny_server, tmp_path, groups_per_batch=4, group_size=STARTING_GROUP_SIZE, num_batches=3, tests=1, eval_every=0,
        **get_algorithm("starting_point", max_tokens=8),
    )  # fmt: skip
    assert (config.learning_rate, config.kl_penalty_coef, STARTING_GROUP_SIZE) == (1e-5, 0.05, 4)
    run = train(config)
    assert 0 < run.metrics()[2]["kl_policy_base"] < 1e-3
    trained = [record for record in run.rollouts(2) if record.trained]
    sampled = [[a for a, m in zip(r.advantages, r.mask, strict=True) if m] for r in trained]
    assert any(len(set(advantages)) > 1 for advantages in sampled), "without the term all tokens of an answer are alike"


@pytest.mark.parametrize("lag", [0, 2])
def test_a_killed_run_resumed_is_to_the_last_bit_one_never_killed(tiny_server, tmp_path, lag):
    command = [sys.executable, "-c", KILLED, tiny_server, str(tmp_path / "killed"), str(lag)]
    killed = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    stopped_at = RunDir(tmp_path / "killed").last_checkpoint()
    assert stopped_at is not None and stopped_at.batch == 2
    resumed = train(small_config(tiny_server, tmp_path / "killed", lag))
    unbroken = train(small_config(tiny_server, tmp_path / "unbroken", lag))
    assert trained_on(resumed) == trained_on(unbroken) and len(trained_on(resumed)) == 5
    assert [(r.batch, r.position, r.final) for r in resumed.checkpoints()] == [
        (r.batch, r.position, r.final) for r in unbroken.checkpoints()
    ]
    assert measured(resumed) == measured(unbroken)
