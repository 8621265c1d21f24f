"""Each aggregation, as scaled advantages, gives the loss that its definition gives in plain loops."""

import numpy as np
import pytest

from mint.errors import BadRequest
from mint.rl.aggregation import AGGREGATIONS, aggregation_scales, scale_advantages
from mint.rl.data_processing import assemble_training_data
from mint.types import Datum
from tests.rl.groups import group, trajectory, transition

# Trajectories of 2, 3 and 4 trained tokens; the third one's two turns are two datums.
TRAJECTORIES = [
    trajectory(transition([1, 1], [2, 3], [-0.5, -1.0])),
    trajectory(transition([1, 1], [4, 5, 6], [-0.1, -0.2, -0.3])),
    trajectory(transition([1], [7, 8, 9], [-0.4, -0.2, -0.9]), transition([5], [6], [-2.0])),
]
ADVANTAGES = [np.array([1.0, -0.5, 0.25])]


def data() -> tuple[list[Datum], list[dict[str, int]]]:
    return assemble_training_data([group([0.0] * 3, TRAJECTORIES)], ADVANTAGES)


def sum_loss(datums: list[Datum], logprobs_D: list[np.ndarray]) -> float:
    """What the server computes: -sum exp(p - q) A."""
    total = 0.0
    for datum, p in zip(datums, logprobs_D, strict=True):
        inputs = {key: value.to_numpy().astype(float) for key, value in datum.loss_fn_inputs.items()}
        total -= float((np.exp(p - inputs["logprobs"]) * inputs["advantages"]).sum())
    return total


def token_losses(datums: list[Datum], logprobs_D: list[np.ndarray]) -> list[list[float]]:
    """Per trajectory, the loss of each trained token."""
    losses: list[list[float]] = [[] for _ in TRAJECTORIES]
    for (datum, p), traj in zip(zip(datums, logprobs_D, strict=True), [0, 1, 2, 2], strict=True):
        inputs = {key: value.to_numpy().astype(float) for key, value in datum.loss_fn_inputs.items()}
        for t, trained in enumerate(inputs["mask"]):
            if trained:
                losses[traj].append(-np.exp(p[t] - inputs["logprobs"][t]) * ADVANTAGES[0][traj])
    return losses


def reference(name: str, losses: list[list[float]], divisor: float) -> float:
    flat = [loss for some in losses for loss in some]
    if name == "token_sum":
        return sum(flat)
    if name == "token_mean":
        return sum(flat) / len(flat)
    if name == "sequence_mean":
        return sum(sum(some) / len(some) for some in losses) / len(losses)
    return sum(sum(some) / divisor for some in losses) / len(losses)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_scaled_advantages_make_the_sum_the_aggregate(name: str) -> None:
    datums, metadata = data()
    rng = np.random.default_rng(0)
    logprobs = [-rng.random(len(datum.loss_fn_inputs["mask"])) for datum in datums]
    scaled = scale_advantages(datums, aggregation_scales(datums, metadata, name, divisor=16.0))
    expected = reference(name, token_losses(datums, logprobs), 16.0)
    assert sum_loss(scaled, logprobs) == pytest.approx(expected, rel=1e-6)


def test_constant_aggregation_needs_its_divisor() -> None:
    with pytest.raises(BadRequest, match="needs a divisor above 0, usually max_tokens; got None"):
        aggregation_scales(*data(), "constant")


def test_an_unknown_aggregation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="token_sum, token_mean, sequence_mean, constant"):
        aggregation_scales(*data(), "mean")


def test_no_datums_have_no_scales() -> None:
    assert len(aggregation_scales([], [], "token_mean")) == 0
