"""Every estimator against plain loops over the definition."""

import itertools
import math
import random

import numpy as np
import pytest

from mint.errors import BadRequest
from mint.rl.advantages import ESTIMATORS, get_estimator
from mint.rl.data_processing import compute_advantages
from tests.rl.groups import group

REWARDS = [
    [1.0, 0.0, 0.0, 1.0],
    [0.25, 0.5, 0.75, 1.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    [3.0, -1.0, 2.0, 2.0],
    [random.Random(i).random() for i in range(7)],
]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("rewards", REWARDS)
def test_group_mean_subtracts_the_mean(rewards: list[float]) -> None:
    expected = [r - mean(rewards) for r in rewards]
    np.testing.assert_allclose(get_estimator("group_mean")(np.array(rewards)), expected, atol=1e-12)


@pytest.mark.parametrize("rewards", REWARDS)
def test_group_std_divides_by_the_sample_deviation(rewards: list[float]) -> None:
    deviation = math.sqrt(sum((r - mean(rewards)) ** 2 for r in rewards) / (len(rewards) - 1))
    expected = [(r - mean(rewards)) / (deviation + 1e-6) for r in rewards]
    np.testing.assert_allclose(get_estimator("group_std")(np.array(rewards)), expected, atol=1e-12)


@pytest.mark.parametrize("rewards", REWARDS)
def test_rloo_subtracts_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(get_estimator("rloo")(np.array(rewards)), expected, atol=1e-12)


def test_max_rl_divides_by_the_mean() -> None:
    np.testing.assert_allclose(get_estimator("max_rl")(np.array([1.0, 0.0, 0.0, 0.0])), [3.0, -1.0, -1.0, -1.0])
    with pytest.raises(BadRequest, match="at least 0"):
        get_estimator("max_rl")(np.array([-1.0, 1.0]))


def subset_advantage(rewards: list[float], i: int, k: int) -> float:
    """By listing every subset of k members with i, and every one without."""
    others = rewards[:i] + rewards[i + 1 :]
    with_it = [max((rewards[i], *rest)) for rest in itertools.combinations(others, k - 1)]
    without_it = [max(some) for some in itertools.combinations(others, k)]
    return mean(with_it) - mean(without_it)


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_what_a_member_adds_to_the_best_of_k(rewards: list[float], k: int) -> None:
    expected = [subset_advantage(rewards, i, k) for i in range(len(rewards))]
    np.testing.assert_allclose(get_estimator(f"pass@{k}")(np.array(rewards)), expected, atol=1e-12)


def test_pass_at_1_is_rloo() -> None:
    rewards = np.array(REWARDS[1])
    np.testing.assert_allclose(get_estimator("pass@1")(rewards), get_estimator("rloo")(rewards), atol=1e-12)


def test_pass_at_k_needs_more_members_than_k() -> None:
    with pytest.raises(BadRequest, match="more than 4 members"):
        get_estimator("pass@4")(np.zeros(4))


@pytest.mark.parametrize("name", [name.replace("@k", "@2") for name in ESTIMATORS])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1])
def test_a_constant_group_has_zero_advantages(name: str, value: float) -> None:
    almost = [value, value, value + 1e-12]  # equal but for rounding
    assert compute_advantages([group(almost)], name)[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["group_mean", "group_std", "rloo", "max_rl"])
def test_a_group_of_one_has_zero_advantage(name: str) -> None:
    assert compute_advantages([group([1.0])], name)[0].tolist() == [0.0]


@pytest.mark.parametrize("name", ["group_median", "pass@k", "pass@x", "rloo@2"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(BadRequest, match="group_mean, group_std, rloo, max_rl, pass@k"):
        get_estimator(name)


def test_a_reward_that_is_no_number_is_refused_by_place() -> None:
    with pytest.raises(BadRequest, match="group 1, member 2: the total reward is nan"):
        compute_advantages([group([0.0, 1.0]), group([0.0, 1.0, math.nan])])
