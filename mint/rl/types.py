"""The nouns of reinforcement learning: environments, what they return, what rollouts leave behind, datasets.

Suffixes name axes, here and in the whole room: `_P` problems (one group each), `_G` members of a group, `_T` time or
tokens, `_D` datums. Environments speak tokens; `mint.rl.envs` has the shapes that speak text. How a rollout is run is
in `mint.rl.rollouts`, what becomes of it in `mint.rl.data_processing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

import mint.types
from mint.errors import BadRequest
from mint.types import ModelInput

Action = list[int]
Observation = ModelInput
Logprobs = list[float]
Metrics = dict[str, float | int]
"""Numbers to be averaged and logged."""
Logs = dict[str, str | int | float]
"""What a person may want to read beside a sample; never averaged."""
Message = dict[str, Any]
"""A chat message: `role`, `content` and, for some, `tool_calls` or `name`."""
StopCondition = Sequence[str | int] | None
"""Strings and token ids that end a turn; None leaves it to the end-of-sequence token."""


class StopReason(StrEnum):
    """Why a rollout ended."""

    COMPLETED = "completed"
    TOOL_STOPPED = "tool_stopped"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The turn's or the trajectory's token budget, prompt included."""
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    MAX_TOOL_CALLS = "max_tool_calls"
    CONTEXT_OVERFLOW = "context_overflow"
    PARSE_ERROR = "parse_error"
    ROLLOUT_TIMEOUT = "rollout_timeout"


@dataclass(frozen=True)
class TokensWithLogprobs:
    """What a policy answered."""

    tokens: list[int]
    maybe_logprobs: list[float] | None
    stop_reason: mint.types.StopReason = "stop"

    @property
    def logprobs(self) -> list[float]:
        if self.maybe_logprobs is None:
            raise BadRequest("this action has no log-probs; only a policy that reports them can be trained.")
        return self.maybe_logprobs


class ActionExtra(TypedDict, total=False):
    """What is known of an action beside its tokens."""

    stop_reason: mint.types.StopReason


@dataclass(frozen=True)
class InitialObservationOverflow:
    """Returned by `initial_observation` when even the first prompt is too long: ends the rollout, fails nothing."""

    reward: float
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)


@dataclass
class StepResult:
    """An environment's answer to an action."""

    reward: float
    episode_done: bool
    next_observation: Observation
    next_stop_condition: StopCondition
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    stop_reason: StopReason | None = None
    """Why the episode is done, where the environment knows better than `completed`."""
    train_on_action: bool = True
    """False keeps the action as context and out of the loss (a turn that did not parse, say)."""


class Env(ABC):
    """One agent's world for one episode; made by an `EnvGroupBuilder`, used once, thrown away."""

    @abstractmethod
    async def initial_observation(self) -> tuple[Observation, StopCondition] | InitialObservationOverflow: ...

    @abstractmethod
    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult: ...


@dataclass
class Transition:
    """One step as it happened."""

    ob: Observation
    ac: TokensWithLogprobs
    reward: float
    episode_done: bool
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    trained: bool = True
    """False: the action tokens stay out of the loss."""


@dataclass(frozen=True)
class Trajectory:
    """One episode."""

    transitions: list[Transition]
    final_ob: Observation | None
    stop_reason: StopReason | None = None

    @property
    def num_action_tokens(self) -> int:
        return sum(len(transition.ac.tokens) for transition in self.transitions)

    @property
    def is_truncated(self) -> bool:
        """The last action was cut off by a token limit rather than finished by the policy."""
        return bool(self.transitions) and self.transitions[-1].ac.stop_reason == "length"


@dataclass(frozen=True)
class RolloutError:
    """One attempt that failed, as data."""

    error_type: str
    error_message: str

    @classmethod
    def of(cls, error: BaseException) -> RolloutError:
        return cls(type(error).__name__, str(error))


@dataclass
class TrajectoryGroup:
    """The rollouts of one problem: the unit within which rewards are compared."""

    trajectories_G: list[Trajectory]
    final_rewards_G: list[float]
    """What `compute_group_rewards` gave each member, on top of its step rewards."""
    metrics_G: list[Metrics]
    rollout_errors: list[RolloutError] = field(default_factory=list)

    def __post_init__(self) -> None:
        lengths = len(self.trajectories_G), len(self.final_rewards_G), len(self.metrics_G)
        if len(set(lengths)) != 1:
            raise BadRequest(
                f"a TrajectoryGroup needs one final reward and one metrics dict for each trajectory; got {lengths[0]} "
                f"trajectories, {lengths[1]} rewards and {lengths[2]} metrics."
            )

    def get_total_rewards(self) -> list[float]:
        return [
            sum(transition.reward for transition in trajectory.transitions) + final_reward
            for trajectory, final_reward in zip(self.trajectories_G, self.final_rewards_G, strict=True)
        ]


class EnvGroupBuilder(ABC):
    """Makes the environments of one group. Keep it picklable: hold configuration, open what is heavy in `make_envs`."""

    @abstractmethod
    async def make_envs(self) -> Sequence[Env]: ...

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """A final reward and metrics for each member; the place for rewards that compare members."""
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self) -> None:  # noqa: B027  (most builders have nothing to clean up)
        """Called once the group is done, whether it went well or not."""

    def logging_tags(self) -> list[str]:
        """Names under which this group's metrics are also reported."""
        return []

    def problem_id(self) -> str | None:
        """A name of the problem that stays the same from run to run: what holdout, overlap check and pass rates per
        problem go by. None: nameless."""
        return None


@dataclass(frozen=True)
class WrappedTrajectoryGroup:
    """A group with where it came from, kept together so that filtering one never misaligns the other."""

    trajectory_group: TrajectoryGroup
    env_group_builder: EnvGroupBuilder
    sampling_client_step: int
    """The training step of the weights that sampled it."""
    sampling_seconds: float = 0.0


class RLDataset(ABC):
    """Batches of problems. `get_batch` is a pure function of its index, so a run can resume anywhere."""

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]: ...

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches."""


class RLDatasetBuilder(ABC):
    """Configuration that becomes a training set and, if there is one, a test set; subclass as a frozen dataclass."""

    @abstractmethod
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]: ...
