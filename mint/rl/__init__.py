"""Reinforcement learning on the client surface: environments in, trained checkpoints out.

The nouns are in `mint.rl.types`, the way from rollouts to datums in `mint.rl.data_processing`, the loop in
`mint.rl.train`. Works against any Tinker-compatible service.
"""

from mint.rl.datasets import InterleavedRLDatasetBuilder
from mint.rl.strategies import FailFast, MinViableGroup, RetryOnFailure, RolloutStrategy
from mint.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Logs,
    Metrics,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    RolloutError,
    StepResult,
    Trajectory,
    TrajectoryGroup,
    Transition,
)

__all__ = [
    "Action",
    "ActionExtra",
    "Env",
    "EnvGroupBuilder",
    "FailFast",
    "InterleavedRLDatasetBuilder",
    "Logs",
    "Metrics",
    "MinViableGroup",
    "Observation",
    "RLDataset",
    "RLDatasetBuilder",
    "RetryOnFailure",
    "RolloutError",
    "RolloutStrategy",
    "StepResult",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
]
