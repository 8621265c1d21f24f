import logging

import numpy as np
import pytest

from mint.errors import BadRequest
from mint.rl.data_processing import (
    assemble_training_data,
    compute_advantages,
    drop_zero_advantages,
    has_signal,
    penalize_overlong,
    remove_constant_reward_groups,
    soft_overlong_penalty,
    trajectory_to_data,
    wire_datums,
)
from mint.types import Datum, ModelInput
from tests.rl.groups import group, trajectory, transition


def lists(datum: Datum) -> dict[str, list[float]]:
    values = {key: np.round(value.to_numpy().astype(float), 6).tolist() for key, value in datum.loss_fn_inputs.items()}
    return {"input": datum.model_input.to_ints(), **values}


# ------------------------------------------------------------------------------------------------------- datums


def test_one_turn_is_the_datum_of_the_documents() -> None:
    prompt, response, logprobs, advantage = [5, 6, 7], [8, 9], [-0.5, -0.25], 0.75
    full, prefix = prompt + response, len(prompt) - 1
    by_hand = Datum(
        model_input=ModelInput.from_ints(tokens=full[:-1]),
        loss_fn_inputs={
            "target_tokens": full[1:],
            "weights": [0.0] * prefix + [1.0] * len(response),
            "logprobs": [0.0] * prefix + logprobs,
            "advantages": [0.0] * prefix + [advantage] * len(response),
        },
    )
    built = wire_datums(trajectory_to_data(trajectory(transition(prompt, response, logprobs)), advantage))
    assert len(built) == 1
    assert built[0].model_input.to_ints() == by_hand.model_input.to_ints()
    assert built[0].loss_fn_inputs == by_hand.loss_fn_inputs


def test_turns_that_extend_each_other_become_one_datum() -> None:
    turns = trajectory(transition([1, 2], [3, 4], [-0.3, -0.4]), transition([1, 2, 3, 4, 5], [6], [-0.6]))
    (datum,) = trajectory_to_data(turns, 2.0)
    assert lists(datum) == {
        "input": [1, 2, 3, 4, 5],
        "target_tokens": [2, 3, 4, 5, 6],
        "logprobs": [0.0, -0.3, -0.4, 0.0, -0.6],
        "advantages": [0.0, 2.0, 2.0, 0.0, 2.0],
        "mask": [0.0, 1.0, 1.0, 0.0, 1.0],
    }


def test_a_broken_prefix_starts_a_new_datum() -> None:
    turns = trajectory(
        transition([1, 2], [3], [-0.3]), transition([1, 2, 3, 4], [5], [-0.5]), transition([1, 9], [6], [-0.6])
    )
    first, second = trajectory_to_data(turns, 1.0)
    assert first.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert lists(second) == {
        "input": [1, 9], "target_tokens": [9, 6], "logprobs": [0.0, -0.6], "advantages": [0.0, 1.0], "mask": [0.0, 1.0],
    }  # fmt: skip


def test_every_action_token_is_trained_once_whatever_the_merging() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        history: list[int] = []
        turns, actions = [], 0
        for _ in range(rng.integers(1, 5)):
            history = [*(history if rng.random() < 0.6 else []), *rng.integers(0, 9, rng.integers(1, 4)).tolist()]
            action = rng.integers(0, 9, rng.integers(0, 4)).tolist()
            turns.append(transition(history, action))
            actions += len(action)
            history = history + action
        data = trajectory_to_data(trajectory(*turns), 1.0)
        assert sum(sum(datum.loss_fn_inputs["mask"].tolist()) for datum in data) == actions


def test_turns_kept_out_of_training_stay_as_context() -> None:
    turns = trajectory(transition([1], [2], trained=False), transition([1, 2, 3], [4], [-0.4]))
    (datum,) = trajectory_to_data(turns, 1.0)
    assert lists(datum)["mask"] == [0.0, 0.0, 1.0]
    assert lists(datum)["advantages"] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "nothing", [trajectory(), trajectory(transition([1, 2], [])), trajectory(transition([1], [2], trained=False))]
)
def test_what_has_no_trained_token_makes_no_datum(nothing: object) -> None:
    assert trajectory_to_data(nothing, 1.0) == []  # type: ignore[arg-type]


def test_logprobs_of_another_length_are_refused() -> None:
    with pytest.raises(BadRequest, match="2 tokens came with 1 log-probs"):
        trajectory_to_data(trajectory(transition([1], [2, 3], [-0.1])), 1.0)


def test_datums_know_their_group_and_member() -> None:
    one, two = trajectory(transition([1], [2])), trajectory(transition([1], [2]), transition([7], [8]))
    groups = [group([0.0, 1.0], [one, two]), group([1.0], [one])]
    data, metadata = assemble_training_data(groups, [np.array([-1.0, 1.0]), np.array([0.5])])
    assert metadata == [
        {"group_idx": 0, "traj_idx": 0},
        {"group_idx": 0, "traj_idx": 1},
        {"group_idx": 0, "traj_idx": 1},
        {"group_idx": 1, "traj_idx": 0},
    ]
    assert [datum.loss_fn_inputs["advantages"].tolist()[-1] for datum in data] == [-1.0, 1.0, 1.0, 0.5]


def test_an_empty_response_counts_in_the_mean_and_trains_nothing() -> None:
    groups = [group([1.0, 0.0], [trajectory(transition([1], [2])), trajectory(transition([1], []))])]
    data, metadata = assemble_training_data(groups, compute_advantages(groups))
    assert [datum.loss_fn_inputs["advantages"].tolist() for datum in data] == [[0.5]]
    assert metadata == [{"group_idx": 0, "traj_idx": 0}]


def test_overlong_masking_keeps_the_reward_and_drops_the_tokens() -> None:
    cut, whole = trajectory(transition([1], [2, 3], stop="length")), trajectory(transition([1], [4]))
    groups = [group([0.0, 1.0], [cut, whole])]
    advantages = compute_advantages(groups)
    data, metadata = assemble_training_data(groups, advantages, mask_overlong=True)
    assert [meta["traj_idx"] for meta in metadata] == [1]
    assert data[0].loss_fn_inputs["advantages"].tolist() == [0.5]
    assert len(assemble_training_data(groups, advantages)[0]) == 2


def test_datums_without_advantage_can_be_dropped() -> None:
    groups = [group([1.0, 0.0, 0.5], [trajectory(transition([1], [2])) for _ in range(3)])]
    data, metadata = drop_zero_advantages(*assemble_training_data(groups, compute_advantages(groups)))
    assert [meta["traj_idx"] for meta in metadata] == [0, 1]
    assert len(data) == 2


def test_the_mask_is_sent_as_weights_or_not_at_all() -> None:
    data = trajectory_to_data(trajectory(transition([1, 2], [3])), 1.0)
    (with_weights,), (without,) = wire_datums(data), wire_datums(data, weights=False)
    assert with_weights.loss_fn_inputs["weights"].tolist() == [0.0, 1.0]
    assert sorted(with_weights.loss_fn_inputs) == ["advantages", "logprobs", "target_tokens", "weights"]
    assert sorted(without.loss_fn_inputs) == ["advantages", "logprobs", "target_tokens"]


# ------------------------------------------------------------------------------------------------------- groups


def test_rewards_equal_but_for_rounding_are_constant() -> None:
    assert not has_signal(group([0.1 + 0.2, 0.3]))
    assert has_signal(group([0.1 + 0.2, 0.3]), tolerance=0.0)
    assert has_signal(group([0.0, 1e-3]))
    assert not has_signal(group([]))


def test_when_all_groups_are_constant_one_is_kept_or_none(caplog: pytest.LogCaptureFixture) -> None:
    groups = [group([1.0, 1.0]), group([0.0, 0.0])]
    with caplog.at_level(logging.WARNING):
        assert remove_constant_reward_groups(groups) == groups[:1]
    assert "no gradient" in caplog.text
    assert remove_constant_reward_groups(groups, keep_one=False) == []


def test_the_soft_overlong_penalty_follows_its_formula() -> None:
    def formula(length: int) -> float:  # as printed in the paper
        if length <= 20 - 5:
            return 0.0
        return ((20 - 5) - length) / 5 if length <= 20 else -1.0

    for length in range(30):
        assert soft_overlong_penalty(length, 20, 5) == pytest.approx(formula(length))


def test_a_buffer_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(BadRequest, match="buffer is 30"):
        soft_overlong_penalty(3, 20, 30)


def test_overlong_penalties_enter_rewards_and_metrics() -> None:
    long, short = trajectory(transition([1], [2] * 18)), trajectory(transition([1], [2] * 3))
    penalized = penalize_overlong(group([1.0, 1.0], [long, short]), max_tokens=20, buffer=5, coef=0.5)
    assert penalized.get_total_rewards() == pytest.approx([0.7, 1.0])
    assert [m["overlong_penalty"] for m in penalized.metrics_G] == pytest.approx([-0.3, 0.0])
