"""The ledger judges problems as defined, the band sampler prefers those that teach, and both survive a kill."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from mint.errors import BadRequest
from mint.rl.band import BandDataset
from mint.rl.datasets import ListRLDataset
from mint.rl.ledger import Ledger
from mint.rl.rundir import RunDir, read_jsonl
from mint.rl.sampler import SampledGroup
from mint.rl.train import Config, train
from mint.rl.types import WrappedTrajectoryGroup
from tests.rl.conftest import ROOT
from tests.rl.fake_service import FakeService, HalfBuilder, HalfDataset
from tests.rl.groups import group


def visit(name: str, rewards: list[float]) -> SampledGroup:
    return SampledGroup(0, (0, 0), WrappedTrajectoryGroup(group(rewards), HalfBuilder(name, len(rewards)), 0))


def recorded(tmp_path: Path, *steps: dict[str, list[float]]) -> Ledger:
    ledger = Ledger(RunDir(tmp_path))
    for number, step in enumerate(steps):
        ledger.record(number, [visit(name, rewards) for name, rewards in step.items()])
    return ledger


# --------------------------------------------------------------------------------------------------------------------
# Judging


@pytest.mark.parametrize(
    ("visits", "state"),
    [
        ([[1, 1, 1, 1]], "learning"),  # too few to tell
        ([[1, 1, 1, 1], [1, 1, 1, 1]], "solved"),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], "dead"),
        ([[0, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], "solved"),  # what was before does not matter
        ([[1, 1, 1, 1], [1, 0, 1, 1]], "learning"),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], "learning"),  # without signal, but moving
        ([[0.6, 0.7, 0.6, 0.6], [0.7, 0.6, 0.7, 0.7]], "learning"),  # all good, and still something to compare
        ([[0.2] * 8], "dead"),
    ],
)
def test_a_problem_is_judged_by_its_latest_eight_rollouts(tmp_path, visits, state):
    ledger = recorded(tmp_path, *({"a": rewards} for rewards in visits))
    assert ledger.state("a") == state
    assert ledger.counts()[state] == 1


def test_the_rate_is_drawn_towards_a_half_where_little_is_known(tmp_path):
    ledger = recorded(tmp_path, {"a": [0, 0], "b": [1, 1, 1, 1, 1, 1, 1, 1], "c": [-1, 3]})
    assert ledger.rate("a") == 0.25 and ledger.rate("b") == 1 and ledger.rate("never seen") == 0.5
    assert ledger.measured_rates() == ([0, 1, 0.5], [2, 8, 2])


def test_a_nameless_problem_goes_by_its_prompt(tmp_path):
    run = train(fake_config(tmp_path, named=False, difficulty_band=None), FakeService(tmp_path / "service"))
    names = [g["problem"] for line in read_jsonl(run.ledger_file) for g in line["groups"]]
    assert len(set(names)) == 24 and all(len(name) == 8 for name in names)


def test_the_ledger_reads_back_what_it_wrote(tmp_path):
    ledger = recorded(tmp_path, {"a": [0, 1]}, {"b": [1, 1], "a": [1, 1]})
    ledger.record_choice(2, ["a", "b"])
    again = Ledger(RunDir(tmp_path), 2)
    assert again.visits == ledger.visits and again.choices == {2: ["a", "b"]}


# --------------------------------------------------------------------------------------------------------------------
# Choosing


def band(tmp_path: Path, names: str, size: int, steps: int = 100, groups_per_batch: int | None = None) -> BandDataset:
    dataset = ListRLDataset([HalfBuilder(name) for name in names], size, seed=None)
    return BandDataset(dataset, Ledger(RunDir(tmp_path)), (0.2, 0.8), steps, groups_per_batch)


def names_of(dataset: BandDataset, index: int) -> str:
    return "".join(builder.problem_id() for builder in dataset.get_batch(index))


RIGHT, WRONG, MIXED = [1.0] * 8, [0.0] * 8, [0.0, 1.0] * 4


def play(dataset: BandDataset, steps: int, rewards: dict[str, list[float]]) -> list[str]:
    chosen = []
    for step in range(steps):
        chosen.append(names_of(dataset, step))
        dataset.ledger.record(step, [visit(name, rewards[name]) for name in chosen[-1]])
    return chosen


def test_new_problems_come_first_then_those_in_the_band(tmp_path):
    rewards = {name: MIXED if name in "ab" else RIGHT if name == "c" else WRONG for name in "abcdef"}
    chosen = play(band(tmp_path, "abcdef", 2), 6, rewards)
    assert chosen == ["ab", "ca", "db", "ea", "fb", "ca"]  # half new, half in the band; "c" is due for its re-test


def test_problems_outside_the_band_are_tried_again_ever_more_rarely(tmp_path):
    rewards = {"a": MIXED, "b": MIXED, "c": MIXED, "d": RIGHT}
    chosen = play(band(tmp_path, "abcd", 2), 60, rewards)
    visits = [step for step, names in enumerate(chosen) if "d" in names]
    assert [b - a for a, b in pairwise(visits)] == [4, 8, 16]
    assert all(len(set(names)) == 2 for names in chosen)


def test_the_nearest_problems_fill_a_batch_when_the_band_is_empty(tmp_path):
    rewards = {"a": WRONG, "b": [0.0] * 7 + [0.4], "c": RIGHT, "d": WRONG}
    chosen = play(band(tmp_path, "abcd", 4), 2, rewards)
    assert sorted(chosen[0]) == sorted(chosen[1]) == ["a", "b", "c", "d"]


def test_fewer_problems_than_places_repeat(tmp_path):
    dataset = BandDataset(
        ListRLDataset([HalfBuilder("a"), HalfBuilder("b")], 5, seed=None, num_batches=3),
        Ledger(RunDir(tmp_path)), (0.2, 0.8), 3,
    )  # fmt: skip
    assert names_of(dataset, 0) == "ababa"


def test_a_choice_once_made_stays(tmp_path):
    dataset = band(tmp_path, "abcdef", 2)
    first = names_of(dataset, 0)
    dataset.ledger.record(0, [visit(name, RIGHT) for name in first])
    assert names_of(dataset, 0) == first


def test_no_batch_is_asked_for_twice_in_a_run(tmp_path):
    assert len(band(tmp_path, "abcdef", 4, steps=10)) > 10
    assert len(band(tmp_path, "abcdef", 2, steps=10, groups_per_batch=5)) > 25


def test_problems_without_names_are_refused(tmp_path):
    dataset = ListRLDataset([HalfBuilder("a", named=False)], 1)
    with pytest.raises(BadRequest, match=r"HalfBuilder.problem_id\(\) gives None"):
        BandDataset(dataset, Ledger(RunDir(tmp_path)), (0.2, 0.8), 1)


@pytest.mark.parametrize("fields", [{"difficulty_band": (0.8, 0.2)}, {"difficulty_band": (0.2,)}])
def test_a_band_that_is_none_is_refused(tmp_path, fields):
    with pytest.raises(BadRequest, match="difficulty_band"):
        fake_config(tmp_path, **fields)


def test_band_and_dynamic_sampling_exclude_each_other(tmp_path):
    with pytest.raises(BadRequest, match="turn one of them off"):
        fake_config(tmp_path, difficulty_band=(0.2, 0.8), dynamic_sampling=1)


# --------------------------------------------------------------------------------------------------------------------
# In the loop


@dataclass(frozen=True)
class ThirdsBuilder(HalfBuilder):
    """Every third problem cannot be solved and every third cannot be missed."""

    async def compute_group_rewards(self, trajectory_group, env_group):
        kind = ord(self.prompt[0]) % 3
        fixed = {1: 0.0, 2: 1.0}.get(kind)
        earned = [sum(t.reward for t in trajectory.transitions) for trajectory in trajectory_group]
        return [(0.0 if fixed is None else fixed - e, {}) for e in earned]


@dataclass(frozen=True)
class ThirdsDataset(HalfDataset):
    async def __call__(self):
        letters = "abcdefghijklmnopqrstuvwxyz"
        builders = [ThirdsBuilder(a + b, self.group_size, self.named) for b in letters[:4] for a in letters]
        return ListRLDataset(builders, self.groups_per_batch, seed=None, limit=48), None


def fake_config(tmp_path: Path, named: bool = True, **fields: object) -> Config:
    values: dict[str, object] = {"difficulty_band": (0.2, 0.8), "save_every": 4, "max_lag": 0} | fields
    return Config(
        learning_rate=0.05, dataset_builder=HalfDataset(named=named, tests=0), model_name="fake", recipe_name="test",
        max_tokens=4, log_path=str(tmp_path / "run"), eval_every=0, loggers=(), **values,
    )  # fmt: skip


def thirds_config(log_path: Path, lag: int, **fields: object) -> Config:
    base = fake_config(log_path.parent, max_lag=lag, max_steps=20, **fields)
    return replace(base, dataset_builder=ThirdsDataset(groups_per_batch=6), log_path=str(log_path))


def signal_share(run: RunDir, first: int) -> float:
    lines = [line for line in run.metrics() if line["step"] >= first]
    return sum(line["env/all/by_group/frac_mixed"] for line in lines) / len(lines)


@pytest.mark.parametrize("lag", [0, 2])
def test_the_band_raises_the_share_of_groups_with_signal(tmp_path, lag):
    with_band = train(thirds_config(tmp_path / "band", lag), FakeService(tmp_path / "s1"))
    without = train(thirds_config(tmp_path / "plain", lag, difficulty_band=None), FakeService(tmp_path / "s2"))
    assert signal_share(without, 12) == pytest.approx(1 / 3, abs=0.1)
    assert signal_share(with_band, 12) > 0.5  # of six: a re-test, two new ones, three in the band
    counts = with_band.metrics()[-1]
    assert counts["ledger/dead"] > 5 and counts["ledger/solved"] > 5 and counts["ledger/learning"] > 10


KILLED = """
import sys
from pathlib import Path
from tests.rl.test_ledger import FakeService, thirds_config
from mint.rl.train import train
service = FakeService(Path(sys.argv[1]) / "service", kill_at=int(sys.argv[2]))
train(thirds_config(Path(sys.argv[1]) / "run", int(sys.argv[3])), service)
"""


@pytest.mark.parametrize(("kill_at", "lag"), [(150, 0), (150, 2)])
def test_a_killed_run_chooses_as_one_never_killed(tmp_path, kill_at, lag):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(kill_at), str(lag)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = train(thirds_config(tmp_path / "run", lag), FakeService(tmp_path / "service"))
    unbroken = train(thirds_config(tmp_path / "unbroken", lag), FakeService(tmp_path / "other"))
    stopped_at = [r.batch for r in resumed.checkpoints()]
    assert stopped_at[0] == 4 and stopped_at == [r.batch for r in unbroken.checkpoints()]
    assert Ledger(resumed).choices == Ledger(unbroken).choices and len(Ledger(resumed).choices) == 20
    assert Ledger(resumed).visits == Ledger(unbroken).visits
