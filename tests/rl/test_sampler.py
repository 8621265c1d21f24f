"""Pacing and data order: who samples what is fixed by the step, not by how long anything takes."""

import asyncio
from dataclasses import dataclass

import pytest

from mint.errors import BadRequest
from mint.rl.sampler import BatchSampler, take
from mint.rl.train import AsyncConfig, Config
from mint.types import ModelInput
from tests.rl.fake_service import Batches, FakeService, HalfBuilder, HalfDataset, base_table


def make_config(tmp_path, **fields) -> Config:
    required = {
        "learning_rate": 0.1,
        "dataset_builder": HalfDataset(),
        "model_name": "bigram",
        "recipe_name": "test",
        "max_tokens": 2,
        "log_path": str(tmp_path / "run"),
    }
    return Config(**(required | fields))


def named(*sizes: int) -> Batches:
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    return Batches([[HalfBuilder(next(letters)) for _ in range(size)] for size in sizes])


def prompts(taken) -> str:
    return "".join(builder.prompt for _, builder in taken)


def test_data_is_taken_by_batch_or_by_count_and_starts_over_at_the_end():
    data = named(3, 2)
    assert (prompts(take(data, (0, 0), None)[0]), take(data, (0, 0), None)[1]) == ("abc", (1, 0))
    assert (prompts(take(data, (0, 2), None)[0]), take(data, (0, 2), None)[1]) == ("c", (1, 0))
    assert (prompts(take(data, (0, 0), 4)[0]), take(data, (0, 0), 4)[1]) == ("abcd", (1, 1))
    assert (prompts(take(data, (1, 1), 6)[0]), take(data, (1, 1), 6)[1]) == ("eabcde", (4, 0))


def test_taking_step_after_step_visits_every_group_equally_often():
    data, position, seen = named(3, 2, 4), (0, 0), ""
    for _ in range(9):
        taken, position = take(data, position, 5)
        seen += prompts(taken)
    assert seen == "abcdefghi" * 5


def test_empty_batches_are_passed_over_and_an_empty_dataset_is_refused():
    assert prompts(take(named(0, 2), (0, 0), None)[0]) == "ab"
    with pytest.raises(BadRequest, match="empty"):
        take(named(0, 0), (0, 0), None)


async def sample_all(config: Config, data: Batches, num_steps: int, service: FakeService):
    """(step, policy version, groups) of a whole run, each policy coming only once the step before is done."""
    sampler = BatchSampler(config, data, num_steps)
    result, began = [], []
    for version in range(num_steps):
        sampler.advance(version, service.sampler(base_table() + version, version))
        began.append(max(sampler.batches))
        batch = sampler.batch(version)
        result.append((batch.step, batch.policy_version, await batch.groups()))
        sampler.forget(version + 1)
    await sampler.close()
    return result, began


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_batch_is_sampled_by_the_policy_that_is_lag_versions_older_and_never_begun_before_it_exists(tmp_path, lag):
    service = FakeService(tmp_path / "s", jitter=0.002)
    result, began = asyncio.run(sample_all(make_config(tmp_path, max_lag=lag), named(*[2] * 8), 8, service))
    assert [version for _, version, _ in result] == [max(0, step - lag) for step in range(8)]
    assert all(g.wrapped.sampling_client_step == version for _, version, groups in result for g in groups)
    assert began == [min(version + lag, 7) for version in range(8)]


def test_rollouts_depend_on_seed_step_and_group_and_not_on_the_order_of_answers(tmp_path):
    def tokens(seed: int, jitter: float):
        service = FakeService(tmp_path / "s", jitter=jitter)
        config = make_config(tmp_path, seed=seed, max_lag=1)
        result, _ = asyncio.run(sample_all(config, named(3, 3, 3), 3, service))
        return [
            [[t.ac.tokens for t in trajectory.transitions] for trajectory in g.group.trajectories_G]
            for _, _, groups in result
            for g in groups
        ]

    first = tokens(seed=1, jitter=0.0)
    assert tokens(seed=1, jitter=0.005) == first
    assert tokens(seed=2, jitter=0.0) != first
    assert len({str(group) for group in first}) == len(first)


def test_a_count_of_groups_overrides_the_datasets_batches(tmp_path):
    config = make_config(tmp_path, async_config=AsyncConfig(max_steps_off_policy=1, groups_per_batch=3))
    result, _ = asyncio.run(sample_all(config, named(2, 2, 2), 4, FakeService(tmp_path / "s")))
    assert [[g.place for g in groups] for _, _, groups in result] == [
        [(0, 0), (0, 1), (1, 0)],
        [(1, 1), (2, 0), (2, 1)],
        [(3, 0), (3, 1), (4, 0)],
        [(4, 1), (5, 0), (5, 1)],
    ]


@dataclass(frozen=True)
class Settled(HalfBuilder):
    """A group whose rewards are all equal, except for those prompts that are upper case."""

    async def compute_group_rewards(self, trajectory_group, env_group):
        given = [sum(t.reward for t in trajectory.transitions) for trajectory in trajectory_group]
        wanted = [float(i) for i in range(len(given))] if self.prompt.isupper() else [0.0] * len(given)
        return [(want - have, {}) for want, have in zip(wanted, given, strict=True)]


@pytest.mark.parametrize("lag", [0, 2])
def test_dynamic_sampling_replaces_groups_without_signal_by_the_next_ones_in_the_data(tmp_path, lag):
    data = Batches([[Settled(p) for p in batch] for batch in ("aB", "cD", "EF", "gh", "IJ")])
    config = make_config(tmp_path, dynamic_sampling=5, max_lag=lag)
    result, _ = asyncio.run(sample_all(config, data, 3, FakeService(tmp_path / "s", jitter=0.002)))
    steps = [[(g.wrapped.env_group_builder.prompt, g.replaced) for g in groups] for _, _, groups in result]
    assert steps == [
        [("a", True), ("B", False), ("c", True), ("D", False)],
        [("E", False), ("F", False)],
        [("g", True), ("h", True), ("I", False), ("J", False)],
    ]
    assert [g.number for g in result[0][2]] == [0, 1, 2, 3]


def test_dynamic_sampling_gives_up_after_its_rounds(tmp_path):
    data = Batches([[Settled(p) for p in "ab"] for _ in range(9)])
    config = make_config(tmp_path, dynamic_sampling=2)
    result, _ = asyncio.run(sample_all(config, data, 1, FakeService(tmp_path / "s")))
    assert len(result[0][2]) == 6 and all(g.replaced for g in result[0][2])


def test_temperature_follows_its_schedule_and_reaches_the_sampler(tmp_path):
    service = FakeService(tmp_path / "s")
    config = make_config(tmp_path, temperature="linear 1.0 -> 0.5", max_lag=1)
    asyncio.run(sample_all(config, named(1, 1, 1), 3, service))
    used = [(s.version, params.temperature) for s in service.samplers for _, _, params in s.requests]
    assert used == [(0, 1.0), (0, 0.75), (1, 0.5)]


def test_a_failing_environment_ends_the_run_unless_failures_are_tolerated(tmp_path):
    class Broken(HalfBuilder):
        async def make_envs(self):
            raise OSError("no sandbox")

    data = Batches([[HalfBuilder("a"), Broken("b")]])
    service = FakeService(tmp_path / "s")
    with pytest.raises(OSError, match="no sandbox"):
        asyncio.run(sample_all(make_config(tmp_path), data, 1, service))
    config = make_config(tmp_path, rollout_error_tolerance=True)
    (_, _, groups), *_ = asyncio.run(sample_all(config, data, 1, service))[0]
    assert [g.wrapped is None for g in groups] == [False, True]
    assert groups[1].errors[0].error_type == "OSError"


def test_an_overlong_answer_is_penalised_before_its_signal_is_judged(tmp_path):
    config = make_config(tmp_path, overlong_buffer=2, overlong_penalty=0.5)
    (_, _, groups), *_ = asyncio.run(sample_all(config, named(1), 1, FakeService(tmp_path / "s")))[0]
    for trajectory, final in zip(groups[0].group.trajectories_G, groups[0].group.final_rewards_G, strict=True):
        assert final == -0.5 * trajectory.num_action_tokens / 2


def test_prompts_are_tokens_of_the_environment(tmp_path):
    (_, _, groups), *_ = asyncio.run(sample_all(make_config(tmp_path), named(1), 1, FakeService(tmp_path / "s")))[0]
    assert groups[0].group.trajectories_G[0].transitions[0].ob == ModelInput.from_ints([1])
