import dataclasses
import pickle

import pytest

from mint.errors import BadRequest
from mint.rl.types import RolloutError, TokensWithLogprobs, Trajectory, TrajectoryGroup
from tests.rl.groups import group, trajectory, transition


def test_a_trajectory_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Trajectory(transitions=[], final_ob=None).stop_reason = None  # type: ignore[misc]


def test_a_group_of_unequal_lengths_is_refused_with_its_lengths() -> None:
    with pytest.raises(BadRequest, match="2 trajectories, 1 rewards and 2 metrics"):
        TrajectoryGroup([Trajectory([], None)] * 2, [1.0], [{}, {}])


def test_total_reward_is_step_rewards_plus_final_reward() -> None:
    steps = trajectory(transition([1], [2], reward=0.25), transition([1, 2, 3], [4], reward=0.5))
    assert group([1.0, -1.0], [steps, trajectory()]).get_total_rewards() == [1.75, -1.0]


def test_truncation_is_read_off_the_last_action() -> None:
    cut, whole = transition([1], [2], stop="length"), transition([1], [2], stop="stop")
    assert trajectory(whole, cut).is_truncated
    assert not trajectory(cut, whole).is_truncated
    assert not trajectory().is_truncated


def test_an_action_without_logprobs_says_so() -> None:
    with pytest.raises(BadRequest, match="no log-probs"):
        _ = TokensWithLogprobs([1], None).logprobs


def test_groups_cross_process_borders() -> None:
    original = group([1.0], [trajectory(transition([1], [2]))])
    original.rollout_errors.append(RolloutError.of(ValueError("x")))
    assert pickle.loads(pickle.dumps(original)) == original
