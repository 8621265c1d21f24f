"""How long a rollout may go on, what happens to output that does not parse, what running into a limit is worth.

Configuration only; `mint.rl.rollouts` keeps the limits, `mint.rl.envs` the parse-error policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from mint.errors import BadRequest
from mint.rl.types import StopReason


@dataclass(frozen=True)
class RolloutLimits:
    """Bounds on one rollout; None is no bound. Meeting one ends the rollout with its stop reason and keeps what there
    is, except for `sampling_turn_timeout_seconds`, which fails it: there is no turn to keep."""

    max_turns: int | None = None
    max_trajectory_tokens: int | None = None
    """Prompt and actions together."""
    max_sampled_tokens: int | None = None
    """Actions alone."""
    max_tool_calls: int | None = None
    """As counted by the `tool_calls` metric of the environment, after each turn."""
    max_turn_tokens: int | None = None
    rollout_timeout_seconds: float | None = None
    sampling_turn_timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value <= 0:
                raise BadRequest(f"RolloutLimits.{limit.name} is {value}; it must be above 0, or None for no limit.")


@dataclass(frozen=True)
class ParseErrorPolicy:
    """What follows output that cannot be read.

    A turn that never ended properly ends the episode: where the next message would begin is unknown. A turn that ended
    but does not parse (a tool call that is not JSON) may be answered with a correction and tried again.
    """

    max_consecutive: int = 0
    """Unreadable turns in a row that are answered with a correction; one more ends the episode."""
    retry_message_template: str = "The previous message had a formatting issue.\nError: {details}"
    penalty_per_error: float = 0.0
    """Subtracted for each turn that is retried."""
    terminal_reward: float = 0.0
    """Reward of the turn that ends the episode."""
    mask_error_turns: bool = False
    """Keep unreadable turns out of the loss."""

    def __post_init__(self) -> None:
        if "{details}" not in self.retry_message_template:
            raise BadRequest(
                f"retry_message_template is {self.retry_message_template!r}; it must hold the place {{details}}."
            )
        if self.max_consecutive < 0 or self.penalty_per_error < 0:
            raise BadRequest(
                f"max_consecutive is {self.max_consecutive} and penalty_per_error {self.penalty_per_error}; "
                "both must be 0 or more."
            )


LIMIT_STOP_REASONS = (
    StopReason.MAX_TOKENS,
    StopReason.MAX_SAMPLED_TOKENS,
    StopReason.MAX_TURNS,
    StopReason.MAX_TOOL_CALLS,
    StopReason.ROLLOUT_TIMEOUT,
)


@dataclass(frozen=True)
class TerminationRewardPolicy:
    """How a reward depends on why the rollout stopped: graded as usual, then clamped."""

    zero_reward_on_limit: bool = False
    """A rollout stopped by a limit earns at most 0; what is below 0 stays."""
    limit_stop_reasons: tuple[str, ...] = LIMIT_STOP_REASONS
    skip_grading_on_timeout: bool = False
    """Do not grade a group in which every rollout timed out and could earn nothing anyway."""
    grader_timeout_seconds: float | None = None
    """For `compute_group_rewards`; past it the group fails."""


@dataclass(frozen=True)
class RolloutConfig:
    """The three together, for presets."""

    limits: RolloutLimits = field(default_factory=RolloutLimits)
    parse_errors: ParseErrorPolicy | None = None
    termination: TerminationRewardPolicy | None = None


def simple() -> RolloutConfig:
    """One question, one answer: no limits beyond the policy's max_tokens."""
    return RolloutConfig()


def agentic() -> RolloutConfig:
    """Several turns with tools, bounded on every side."""
    return RolloutConfig(
        RolloutLimits(max_turns=10, max_trajectory_tokens=65_536, max_tool_calls=30),
        ParseErrorPolicy(max_consecutive=2),
        TerminationRewardPolicy(grader_timeout_seconds=900),
    )
