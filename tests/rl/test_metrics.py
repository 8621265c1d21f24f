import asyncio

import numpy as np
import pytest

from mint.rl.data_processing import trajectory_to_data
from mint.rl.envs import ProblemGroupBuilder
from mint.rl.metrics import (
    RolloutErrorCounter,
    compute_kl_sample_train,
    compute_post_kl,
    compute_sampling_client_metrics,
    compute_trajectory_metrics,
    distinct_n,
)
from mint.rl.types import RolloutError, StopReason, WrappedTrajectoryGroup
from tests.rl.fakes import FakeSamplingClient, log_softmax
from tests.rl.groups import group, trajectory, transition

GOOD = group([1.0, 1.0], [trajectory(transition([1, 2], [3]), stop_reason=StopReason.COMPLETED)] * 2)
BAD = group([0.0, 0.0], [trajectory(transition([1], [2, 2, 2], stop="length"), stop_reason=StopReason.MAX_TOKENS)] * 2)
MIXED = group(
    [0.0, 1.0],
    [
        trajectory(transition([1], [4, 5], correct=0.0), transition([1, 4, 5, 6], [7], correct=1.0, speed=3.0)),
        trajectory(transition([1], []), stop_reason=StopReason.COMPLETED),
    ],
)


def test_the_published_names_and_their_values() -> None:
    metrics = compute_trajectory_metrics([GOOD, BAD, MIXED], [["a"], ["a"], ["a"]])
    expected = {
        "ac_tokens_per_turn": (1 + 1 + 3 + 3 + 2 + 1 + 0) / 7,
        "ob_tokens_per_turn": (2 + 2 + 1 + 1 + 1 + 4 + 1) / 7,
        "turns_per_episode": 7 / 6,
        "total_episodes": 6,
        "total_turns": 7,
        "total_ac_tokens": 11,
        "total_ob_tokens": 12,
        "reward/total": 0.5,
        "reward/success": 3 / 6,
        "by_group/frac_mixed": 1 / 3,
        "by_group/frac_all_good": 1 / 3,
        "by_group/frac_all_bad": 1 / 3,
        "correct": 0.5,  # of the two steps that reported it
        "speed": 3.0,
        "stop/completed": 3 / 6,
        "stop/max_tokens": 2 / 6,
        "truncated": 2 / 6,
        "empty": 1 / 6,
        "reward/truncated": 0.0,
        "reward/complete": 3 / 4,
        "duplicates": (0.5 + 0.5 + 0.0) / 3,
        "distinct_1": (1 / 2 + 1 / 6 + 1) / 3,
        "distinct_2": (0 + 1 / 4 + 1) / 3,
    }
    assert metrics == {f"env/all/{name}": pytest.approx(value) for name, value in expected.items()}


def test_tags_that_not_all_share_get_metrics_of_their_own() -> None:
    metrics = compute_trajectory_metrics([GOOD, BAD], [["math", "easy"], ["math"]])
    assert metrics["env/easy/reward/total"] == 1.0
    assert metrics["env/all/reward/total"] == 0.5
    assert not any(name.startswith("env/math/") for name in metrics)


def test_no_groups_have_no_nan() -> None:
    assert all(np.isfinite(value) for value in compute_trajectory_metrics([], []).values())


def test_groups_and_tags_that_do_not_line_up_are_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        compute_trajectory_metrics([GOOD, BAD], [["a"]])


def test_distinct_n_counts_different_ngrams() -> None:
    assert distinct_n([[1, 2, 1, 2], [1, 2]], 2) == 2 / 4
    assert distinct_n([[1]], 2) == 0.0


def test_sampler_and_trainer_are_compared_on_trained_tokens_alone() -> None:
    data = trajectory_to_data(trajectory(transition([1, 2], [3, 4], [-1.0, -2.0])), 1.0)
    trainer = [np.array([-99.0, -1.5, -1.0])]  # the first is an observation token
    assert compute_kl_sample_train(data, trainer) == {
        "optim/kl_sample_train_v1": pytest.approx((0.5 - 1.0) / 2),
        "optim/kl_sample_train_v2": pytest.approx((0.25 + 1.0) / 4),
        "optim/kl_sample_train_max": pytest.approx(1.0),
        "optim/entropy": pytest.approx(1.5),
    }
    assert compute_kl_sample_train([], []) == {}


def test_post_kl_scores_the_same_tokens_again() -> None:
    table = np.random.default_rng(0).normal(size=(5, 5))
    data = trajectory_to_data(trajectory(transition([1, 2], [3, 4], [-1.0, -2.0])), 1.0)
    rows = log_softmax(table)
    diffs = [-1.0 - rows[2, 3], -2.0 - rows[3, 4]]
    assert asyncio.run(compute_post_kl(data, FakeSamplingClient(table))) == {
        "kl_pre_post_v1": pytest.approx(sum(diffs) / 2, rel=1e-5),
        "kl_pre_post_v2": pytest.approx(sum(d * d for d in diffs) / 4, rel=1e-5),
    }


def test_staleness_and_sampling_time() -> None:
    builder = ProblemGroupBuilder(lambda: None, 2)  # type: ignore[arg-type,return-value]
    wrapped = [WrappedTrajectoryGroup(GOOD, builder, step, seconds) for step, seconds in ((3, 1.0), (5, 2.0))]
    assert compute_sampling_client_metrics(wrapped) == {
        "sampling_client/step_max": 5, "sampling_client/step_min": 3, "sampling_client/step_mean": 4.0,
        "time/sampling_time_max": 2.0, "time/sampling_time_min": 1.0, "time/sampling_time_mean": 1.5,
    }  # fmt: skip
    assert compute_sampling_client_metrics([]) == {}


def test_errors_add_up_over_a_run() -> None:
    counter = RolloutErrorCounter()
    assert counter.get_metrics() == {}
    counter.add([RolloutError("ValueError", "x"), RolloutError("TimeoutError", "")])
    counter.add([RolloutError("ValueError", "y")], group_skipped=True)
    assert counter.get_metrics() == {
        "rollout_errors/ValueError": 2.0,
        "rollout_errors/TimeoutError": 1.0,
        "rollout_errors/total": 3.0,
        "rollout_errors/groups_skipped": 1.0,
    }
