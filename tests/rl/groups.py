"""Trajectories and groups made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from mint.rl.types import StopReason, TokensWithLogprobs, Trajectory, TrajectoryGroup, Transition
from mint.types import ModelInput
from mint.types import StopReason as SamplerStop


def transition(
    ob: Sequence[int],
    ac: Sequence[int],
    logprobs: Sequence[float] | None = None,
    reward: float = 0.0,
    stop: SamplerStop = "stop",
    trained: bool = True,
    **metrics: float,
) -> Transition:
    given = list(logprobs) if logprobs is not None else [-0.1 * (i + 1) for i in range(len(ac))]
    action = TokensWithLogprobs(list(ac), given, stop)
    return Transition(ModelInput.from_ints(list(ob)), action, reward, True, dict(metrics), trained=trained)


def trajectory(*transitions: Transition, stop_reason: StopReason | None = None) -> Trajectory:
    return Trajectory(list(transitions), None, stop_reason)


def group(rewards: Sequence[float], trajectories: Sequence[Trajectory] | None = None) -> TrajectoryGroup:
    """Rewards come as final rewards, on top of whatever the trajectories' steps earned."""
    given = list(trajectories) if trajectories is not None else [Trajectory([], None) for _ in rewards]
    return TrajectoryGroup(given, list(rewards), [{} for _ in rewards])
