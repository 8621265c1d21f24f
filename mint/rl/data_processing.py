"""From groups of trajectories to datums: which groups are kept, what each member's advantage is, which tokens learn.

Pure functions. The estimators themselves are in `mint.rl.advantages`, token means and the like in
`mint.rl.aggregation`, the KL terms in `mint.rl.kl`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mint.errors import BadRequest
from mint.rl.advantages import get_estimator
from mint.rl.types import Trajectory, TrajectoryGroup
from mint.types import Datum, ModelInput, TensorData

logger = logging.getLogger(__name__)

REWARD_TOLERANCE = 1e-8
"""Rewards closer than this are the same reward: sums of floats rarely agree to the last bit."""

# --------------------------------------------------------------------------------------------------------------------
# Groups


def compute_advantages(trajectory_groups_P: list[TrajectoryGroup], estimator: str = "group_mean") -> list[np.ndarray]:
    """One array per group, one advantage per member. `estimator`: see `mint.rl.advantages.ESTIMATORS`."""
    estimate = get_estimator(estimator)
    advantages_P = []
    for i, group in enumerate(trajectory_groups_P):
        rewards_G = np.array(group.get_total_rewards(), dtype=np.float64)
        if not np.isfinite(rewards_G).all():
            member = int(np.flatnonzero(~np.isfinite(rewards_G))[0])
            raise BadRequest(f"group {i}, member {member}: the total reward is {rewards_G[member]}; it must be finite.")
        advantages_P.append(estimate(rewards_G) if has_signal(group) else np.zeros(len(rewards_G)))
    return advantages_P


def has_signal(group: TrajectoryGroup, tolerance: float = REWARD_TOLERANCE) -> bool:
    """Whether the members' rewards differ, so that there is something to learn: what dynamic sampling asks of a group
    before it counts towards the batch."""
    rewards_G = group.get_total_rewards()
    return bool(rewards_G) and max(rewards_G) - min(rewards_G) > tolerance


def remove_constant_reward_groups(
    trajectory_groups_P: list[TrajectoryGroup], tolerance: float = REWARD_TOLERANCE, keep_one: bool = True
) -> list[TrajectoryGroup]:
    """The groups with signal. If there is none, the first group and a warning, or with `keep_one=False` an empty list
    (then skip the optimizer step: a zero gradient still moves weights through Adam's momentum)."""
    kept_P = [group for group in trajectory_groups_P if has_signal(group, tolerance)]
    if not kept_P and keep_one:
        logger.warning("All %d groups have constant rewards: there is no gradient.", len(trajectory_groups_P))
        return trajectory_groups_P[:1]
    return kept_P


def soft_overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """DAPO's length term (arXiv 2503.14476, eq. 13): 0 up to max_tokens - buffer, then falling evenly to -1."""
    if not 0 < buffer <= max_tokens:
        raise BadRequest(f"the overlong buffer is {buffer}; it must be in 1..max_tokens, which is {max_tokens}.")
    return -min(max(length - (max_tokens - buffer), 0) / buffer, 1.0)


def penalize_overlong(group: TrajectoryGroup, max_tokens: int, buffer: int, coef: float = 1.0) -> TrajectoryGroup:
    """The group with the soft overlong penalty in its final rewards, and in its metrics as `overlong_penalty`."""
    penalties_G = [
        coef * soft_overlong_penalty(trajectory.num_action_tokens, max_tokens, buffer)
        for trajectory in group.trajectories_G
    ]
    return replace(
        group,
        final_rewards_G=[r + p for r, p in zip(group.final_rewards_G, penalties_G, strict=True)],
        metrics_G=[{**m, "overlong_penalty": p} for m, p in zip(group.metrics_G, penalties_G, strict=True)],
    )


# --------------------------------------------------------------------------------------------------------------------
# Datums


@dataclass
class _Sequence:
    """Tokens of one datum to be, with what the loss needs to know of each."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)

    def extend(self, tokens: list[int], logprobs: list[float], advantage: float, trained: bool) -> None:
        if len(logprobs) != len(tokens):
            raise BadRequest(
                f"an action of {len(tokens)} tokens came with {len(logprobs)} log-probs; one each is needed."
            )
        self.tokens += tokens
        self.logprobs += logprobs
        self.advantages += [advantage if trained else 0.0] * len(tokens)
        self.mask += [float(trained)] * len(tokens)

    def datum(self) -> Datum:
        return Datum(
            ModelInput.from_ints(self.tokens[:-1]),
            {
                "target_tokens": TensorData(self.tokens[1:], "int64"),
                "logprobs": TensorData(self.logprobs[1:], "float32"),
                "advantages": TensorData(self.advantages[1:], "float32"),
                "mask": TensorData(self.mask[1:], "float32"),
            },
        )


def _sequences(trajectory: Trajectory, advantage: float) -> Iterable[_Sequence]:
    sequence = _Sequence()
    for transition in trajectory.transitions:
        observation = transition.ob.to_ints()
        seen = len(sequence.tokens)
        if observation[:seen] != sequence.tokens:
            yield sequence
            sequence, seen = _Sequence(), 0
        new = observation[seen:]
        sequence.extend(new, [0.0] * len(new), 0.0, trained=False)
        action = transition.ac
        sequence.extend(action.tokens, action.logprobs if action.tokens else [], advantage, transition.trained)
    yield sequence


def trajectory_to_data(trajectory: Trajectory, traj_advantage: float) -> list[Datum]:
    """The trajectory as datums: one as long as each observation extends all tokens before it, a new one where not.

    (ob1, ac1), (ob1+ac1+ob2, ac2), (ob3, ac3)  ->  [ob1 ac1 ob2 ac2], [ob3 ac3]

    `advantages` and `mask` are 0 on observation tokens and on actions kept out of training. A sequence without one
    trained token makes no datum: an empty response counts in the group's mean and nowhere else.
    """
    return [s.datum() for s in _sequences(trajectory, traj_advantage) if any(s.mask[1:])]


def assemble_training_data(
    trajectory_groups_P: list[TrajectoryGroup], advantages_P: Sequence[np.ndarray], mask_overlong: bool = False
) -> tuple[list[Datum], list[dict[str, int]]]:
    """All datums, and for each where it came from (`group_idx`, `traj_idx`).

    `mask_overlong`: truncated trajectories teach nothing, though their rewards count in the group's mean (DAPO).
    """
    data_D: list[Datum] = []
    metadata_D: list[dict[str, int]] = []
    for group_idx, (group, advantages_G) in enumerate(zip(trajectory_groups_P, advantages_P, strict=True)):
        for traj_idx, (trajectory, advantage) in enumerate(zip(group.trajectories_G, advantages_G, strict=True)):
            if mask_overlong and trajectory.is_truncated:
                continue
            new_D = trajectory_to_data(trajectory, float(advantage))
            data_D += new_D
            metadata_D += [{"group_idx": group_idx, "traj_idx": traj_idx}] * len(new_D)
    return data_D, metadata_D


def drop_zero_advantages(
    data_D: list[Datum], metadata_D: list[dict[str, int]]
) -> tuple[list[Datum], list[dict[str, int]]]:
    """Without the datums that carry no gradient. For losses linear in the advantage, and after any KL penalty."""
    kept = [i for i, datum in enumerate(data_D) if datum.loss_fn_inputs["advantages"].to_numpy().any()]
    return [data_D[i] for i in kept], [metadata_D[i] for i in kept]


NOT_SENT = frozenset({"mask", "reference_logprobs"})


def wire_datums(data_D: Sequence[Datum], weights: bool = True) -> list[Datum]:
    """Datums as they are sent: the mask goes as `weights`, the name MinT's documents use for it; what was only noted
    for the run directory stays here.

    `weights=False` leaves it out, for services that refuse keys beyond Tinker's three. That changes nothing for losses
    linear in the advantage, which is 0 wherever the mask is; `dro` and `gspo` need the mask.
    """
    sent_D = []
    for datum in data_D:
        inputs = {key: value for key, value in datum.loss_fn_inputs.items() if key not in NOT_SENT}
        if weights:
            inputs["weights"] = datum.loss_fn_inputs["mask"]
        sent_D.append(Datum(datum.model_input, inputs))
    return sent_D
