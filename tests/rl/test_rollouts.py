"""Rollouts of small scripted worlds under a scripted policy."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from mint.errors import BadRequest
from mint.rl.completers import TokenCompleter
from mint.rl.data_processing import trajectory_to_data
from mint.rl.rollout_limits import ParseErrorPolicy, RolloutLimits, TerminationRewardPolicy, agentic
from mint.rl.rollouts import do_group_rollout, do_single_rollout, try_group_rollout
from mint.rl.strategies import FailFast, MinViableGroup, RetryOnFailure
from mint.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Observation,
    RolloutError,
    StepResult,
    StopCondition,
    StopReason,
    TokensWithLogprobs,
    Trajectory,
    TrajectoryGroup,
)
from mint.types import ModelInput
from tests import hourglass


@dataclass
class Scripted(TokenCompleter):
    """Answers [1, 2, 3], cut to the limit of the call; keeps what it was asked."""

    asked: list[tuple[int, int | None]] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    seconds: float = 0.0

    async def __call__(
        self, model_input: Observation, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.asked.append((model_input.length, max_tokens))
        await asyncio.sleep(self.seconds)
        tokens = [1, 2, 3][:max_tokens]
        return TokensWithLogprobs(tokens, [-0.5] * len(tokens), "stop" if len(tokens) == 3 else "length")

    async def complete_many(
        self, model_input: Observation, stop: StopCondition, count: int, *, max_tokens: int | None = None
    ) -> list[TokensWithLogprobs]:
        self.together.append(count)
        return [await self(model_input, stop, max_tokens=max_tokens) for _ in range(count)]


@dataclass
class Counting(Env):
    """Lasts `turns` turns, one point each; every observation is the whole past and one token more."""

    turns: int = 3
    first: tuple[int, ...] = (9, 9)
    on_step: Callable[[], None] = lambda: None
    tool_calls: int = 0
    taken: int = 0
    seen: list[int] = field(default_factory=list)

    async def initial_observation(self) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        self.seen = list(self.first)
        return ModelInput.from_ints(self.seen), [7]

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self.on_step()
        self.taken += 1
        self.seen = [*self.seen, *action, 8]
        done = self.taken == self.turns
        metrics: Metrics = {"tool_calls": self.tool_calls}
        return StepResult(1.0, done, ModelInput.from_ints(self.seen), [7], metrics)


def roll(env: Env, limits: RolloutLimits | None = None, policy: TokenCompleter | None = None) -> Trajectory:
    return hourglass.run(do_single_rollout(policy or Scripted(), env, limits))


def test_an_episode_is_recorded_turn_by_turn() -> None:
    trajectory = roll(Counting(turns=2))
    assert [t.ob.to_ints() for t in trajectory.transitions] == [[9, 9], [9, 9, 1, 2, 3, 8]]
    assert [t.episode_done for t in trajectory.transitions] == [False, True]
    assert trajectory.final_ob == ModelInput.from_ints([9, 9, 1, 2, 3, 8, 1, 2, 3, 8])
    assert trajectory.stop_reason == StopReason.COMPLETED
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


@pytest.mark.parametrize(
    ("limits", "turns", "reason"),
    [
        (RolloutLimits(max_turns=2), 2, StopReason.MAX_TURNS),
        (RolloutLimits(max_sampled_tokens=6), 2, StopReason.MAX_SAMPLED_TOKENS),
        (RolloutLimits(max_trajectory_tokens=6), 1, StopReason.MAX_TOKENS),
        (RolloutLimits(max_tool_calls=4), 2, StopReason.MAX_TOOL_CALLS),
        (RolloutLimits(max_turns=9), 3, StopReason.COMPLETED),
    ],
)
def test_limits_end_a_rollout_with_their_reason(limits: RolloutLimits, turns: int, reason: StopReason) -> None:
    trajectory = roll(Counting(turns=3, tool_calls=2), limits)
    assert len(trajectory.transitions) == turns
    assert trajectory.stop_reason == reason


def test_a_prompt_beyond_the_budget_is_never_sampled() -> None:
    policy = Scripted()
    trajectory = roll(Counting(), RolloutLimits(max_trajectory_tokens=2), policy)
    assert (trajectory.transitions, trajectory.stop_reason, policy.asked) == ([], StopReason.MAX_TOKENS, [])


def test_a_turn_may_have_what_is_left_of_every_budget() -> None:
    policy = Scripted()
    roll(Counting(), RolloutLimits(max_trajectory_tokens=9, max_sampled_tokens=100, max_turn_tokens=50), policy)
    assert policy.asked == [(2, 7), (6, 3)]
    policy = Scripted()
    trajectory = roll(Counting(), RolloutLimits(max_sampled_tokens=5), policy)
    assert policy.asked == [(2, 5), (6, 2)]
    assert trajectory.is_truncated
    assert trajectory.stop_reason == StopReason.MAX_SAMPLED_TOKENS


def test_a_last_turn_cut_off_is_max_tokens() -> None:
    trajectory = roll(Counting(turns=1), RolloutLimits(max_turn_tokens=2))
    assert trajectory.stop_reason == StopReason.MAX_TOKENS


def test_out_of_time_the_turns_so_far_are_kept() -> None:
    policy = Scripted()

    def slow_down() -> None:
        policy.seconds = 60.0

    trajectory = roll(Counting(on_step=slow_down), RolloutLimits(rollout_timeout_seconds=0.05), policy)
    assert len(trajectory.transitions) == 1
    assert trajectory.stop_reason == StopReason.ROLLOUT_TIMEOUT


def test_a_sampling_call_out_of_time_fails_the_rollout() -> None:
    with pytest.raises(TimeoutError):
        roll(Counting(), RolloutLimits(sampling_turn_timeout_seconds=0.02), Scripted(seconds=60.0))


def test_an_environments_own_timeout_is_an_error_and_no_limit() -> None:
    def give_up() -> None:
        raise TimeoutError("the sandbox")

    with pytest.raises(TimeoutError, match="the sandbox"):
        roll(Counting(on_step=give_up), RolloutLimits(rollout_timeout_seconds=30))


class Overflowing(Counting):
    async def initial_observation(self) -> InitialObservationOverflow:
        return InitialObservationOverflow(-0.1, {"context_overflow": 1.0})


def test_an_overflowing_prompt_is_a_step_without_tokens() -> None:
    trajectory = roll(Overflowing())
    assert [(t.reward, t.ac.tokens) for t in trajectory.transitions] == [(-0.1, [])]
    assert trajectory.stop_reason == StopReason.MAX_TOKENS
    assert trajectory_to_data(trajectory, 1.0) == []


@pytest.mark.parametrize("bad", [{"max_turns": 0}, {"rollout_timeout_seconds": -1.0}])
def test_limits_below_zero_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadRequest, match="must be above 0"):
        RolloutLimits(**bad)  # type: ignore[arg-type]


def test_a_template_without_its_place_is_refused() -> None:
    with pytest.raises(BadRequest, match="details"):
        ParseErrorPolicy(retry_message_template="try again")
    assert agentic().limits.max_tool_calls == 30


# ------------------------------------------------------------------------------------------------------- groups


@dataclass
class Group(EnvGroupBuilder):
    make: Callable[[int], Env]
    size: int = 4
    final: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    made: int = 0
    cleaned: int = 0
    graded: int = 0

    async def make_envs(self) -> Sequence[Env]:
        self.made += 1
        return [self.make(self.made) for _ in range(self.size)]

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        self.graded += 1
        assert len(trajectory_group) == len(env_group)
        return [(reward, {"final": reward}) for reward, _ in zip(self.final, trajectory_group, strict=False)]

    async def cleanup(self) -> None:
        self.cleaned += 1


def test_a_group_is_rolled_out_graded_and_cleaned_up() -> None:
    builder = Group(lambda made: Counting(turns=2), final=(0.5, 1.0, 0.0, 0.0))
    group = hourglass.run(do_group_rollout(builder, Scripted()))
    assert group.get_total_rewards() == [2.5, 3.0, 2.0, 2.0]
    assert group.metrics_G[1] == {"final": 1.0}
    assert (builder.made, builder.graded, builder.cleaned) == (1, 1, 1)


def test_members_with_one_prompt_open_in_one_request() -> None:
    policy = Scripted()
    hourglass.run(do_group_rollout(Group(lambda made: Counting(turns=2)), policy))
    assert policy.together == [4]
    assert len(policy.asked) == 8  # two turns each, the first ones through complete_many


def test_members_with_different_prompts_open_one_by_one() -> None:
    policy, prompts = Scripted(), iter(range(9))
    hourglass.run(do_group_rollout(Group(lambda made: Counting(first=(next(prompts), 5))), policy))
    assert policy.together == []


def test_if_the_shared_request_fails_members_try_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    class Unshared(Scripted):
        async def complete_many(self, *args: object, **options: object) -> list[TokensWithLogprobs]:
            raise ConnectionError("one lost request")

    with caplog.at_level(logging.WARNING):
        group = hourglass.run(do_group_rollout(Group(lambda made: Counting()), Unshared()))
    assert len(group.trajectories_G) == 4
    assert "one lost request" in caplog.text


def breaks_once(made: int) -> Env:
    def fail() -> None:
        if made == 1:
            raise RuntimeError("container lost")

    return Counting(on_step=fail)


def test_fail_fast_lets_the_error_through_and_still_cleans_up() -> None:
    builder = Group(breaks_once)
    with pytest.raises(RuntimeError, match="container lost"):
        hourglass.run(try_group_rollout(builder, Scripted(), FailFast()))
    assert builder.cleaned == 1


def test_retry_uses_fresh_environments() -> None:
    builder = Group(breaks_once)
    group = hourglass.run(do_group_rollout(builder, Scripted(), RetryOnFailure(max_retries=4)))
    assert [len(t.transitions) for t in group.trajectories_G] == [3, 3, 3, 3]
    assert [error.error_type for error in group.rollout_errors] == ["RuntimeError"] * 4
    assert builder.made == 5


def test_a_lost_group_is_skipped_with_its_errors() -> None:
    outcome = hourglass.run(try_group_rollout(Group(breaks_once), Scripted(), RetryOnFailure(max_retries=0)))
    assert isinstance(outcome, list)
    assert outcome[0] == RolloutError("RuntimeError", "container lost")


def test_an_environment_that_cannot_open_costs_only_itself() -> None:
    class Closed(Counting):
        async def initial_observation(self) -> tuple[Observation, StopCondition]:
            raise OSError("no such task")

    members = iter(range(99))
    builder = Group(lambda made: Closed() if next(members) == 2 else Counting())
    group = hourglass.run(do_group_rollout(builder, Scripted(), MinViableGroup(max_retries=0)))
    assert len(group.trajectories_G) == 3
    assert [error.error_type for error in group.rollout_errors] == ["OSError"]


def test_limits_can_cost_the_reward_but_not_the_penalty() -> None:
    policy = TerminationRewardPolicy(zero_reward_on_limit=True)
    builder = Group(lambda made: Counting(), final=(1.0, -5.0, 0.0, 0.0))
    group = hourglass.run(do_group_rollout(builder, Scripted(), termination=policy, limits=RolloutLimits(max_turns=2)))
    assert group.get_total_rewards() == [0.0, -3.0, 0.0, 0.0]
    assert group.metrics_G[0]["zero_reward_on_limit"] == 1.0
    assert "zero_reward_on_limit" not in group.metrics_G[1]


def test_a_group_that_timed_out_whole_need_not_be_graded() -> None:
    policy = TerminationRewardPolicy(zero_reward_on_limit=True, skip_grading_on_timeout=True)
    builder = Group(lambda made: Counting())
    limits = RolloutLimits(rollout_timeout_seconds=0.02)
    group = hourglass.run(do_group_rollout(builder, Scripted(seconds=60.0), termination=policy, limits=limits))
    assert builder.graded == 0
    assert isinstance(group, TrajectoryGroup)
    assert {t.stop_reason for t in group.trajectories_G} == {StopReason.ROLLOUT_TIMEOUT}


def test_a_grader_out_of_time_fails_the_group() -> None:
    class Slow(Group):
        async def compute_group_rewards(
            self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
        ) -> list[tuple[float, Metrics]]:
            await asyncio.sleep(60)
            return []

    outcome = hourglass.run(
        try_group_rollout(
            Slow(lambda made: Counting()),
            Scripted(),
            MinViableGroup(),
            TerminationRewardPolicy(grader_timeout_seconds=0.02),
        )
    )
    assert outcome == [RolloutError("TimeoutError", "")]
