"""Running environments under a policy: one rollout, one group.

Here failures become data: a limit ends a rollout with a reason, an exception becomes a `RolloutError`. What the rest
of the group does about a failed member is the strategy's business (`mint.rl.strategies`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from mint.rl.completers import TokenCompleter
from mint.rl.rollout_limits import RolloutLimits, TerminationRewardPolicy
from mint.rl.strategies import FailFast, GroupFailed, RolloutStrategy
from mint.rl.types import (
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Metrics,
    Observation,
    RolloutError,
    StopCondition,
    StopReason,
    TokensWithLogprobs,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from mint.types import ModelInput

logger = logging.getLogger(__name__)


@dataclass
class Opening:
    """What an environment showed first, and the first answer where the group's were sampled together."""

    first: tuple[Observation, StopCondition] | InitialObservationOverflow
    action: TokensWithLogprobs | None = None


@dataclass
class _Run:
    """One rollout in progress."""

    policy: TokenCompleter
    env: Env
    limits: RolloutLimits
    transitions: list[Transition] = field(default_factory=list)
    ob: Observation = field(default_factory=ModelInput.empty)
    sampled_tokens: int = 0
    tool_calls: float = 0

    async def play(self, opening: Opening | None) -> StopReason:
        opening = opening or Opening(await self.env.initial_observation())
        if isinstance(opening.first, InitialObservationOverflow):
            return self._overflow(opening.first)
        (self.ob, stop), action = opening.first, opening.action
        while True:
            reason = self._spent()
            if reason is not None:
                return reason
            action = action or await self._act(stop)
            step = await self.env.step(action.tokens, extra={"stop_reason": action.stop_reason})
            self.transitions.append(
                Transition(
                    self.ob, action, step.reward, step.episode_done, step.metrics, step.logs, step.train_on_action
                )
            )
            self.sampled_tokens += len(action.tokens)
            self.tool_calls += step.metrics.get("tool_calls", 0)
            self.ob, stop = step.next_observation, step.next_stop_condition
            if step.episode_done:
                cut_off = action.stop_reason == "length"
                return step.stop_reason or (StopReason.MAX_TOKENS if cut_off else StopReason.COMPLETED)
            action = None

    async def _act(self, stop: StopCondition) -> TokensWithLogprobs:
        async with asyncio.timeout(self.limits.sampling_turn_timeout_seconds):
            return await self.policy(self.ob, stop, max_tokens=turn_budget(self.limits, self.ob, self.sampled_tokens))

    def _spent(self) -> StopReason | None:
        limits = self.limits
        spent = (
            (StopReason.MAX_TURNS, len(self.transitions), limits.max_turns),
            (StopReason.MAX_SAMPLED_TOKENS, self.sampled_tokens, limits.max_sampled_tokens),
            (StopReason.MAX_TOKENS, self.ob.length, limits.max_trajectory_tokens),
            (StopReason.MAX_TOOL_CALLS, self.tool_calls, limits.max_tool_calls),
        )
        return next((reason for reason, used, limit in spent if limit is not None and used >= limit), None)

    def _overflow(self, overflow: InitialObservationOverflow) -> StopReason:
        """One step without tokens: it trains nothing, but its reward counts in the group's mean."""
        nothing = TokensWithLogprobs([], [])
        self.transitions.append(Transition(self.ob, nothing, overflow.reward, True, overflow.metrics, overflow.logs))
        return StopReason.MAX_TOKENS


def turn_budget(limits: RolloutLimits, ob: Observation, sampled_tokens: int) -> int | None:
    """Tokens the next turn may have; None leaves it to the policy."""
    budgets = [limits.max_turn_tokens]
    if limits.max_trajectory_tokens is not None:
        budgets.append(limits.max_trajectory_tokens - ob.length)
    if limits.max_sampled_tokens is not None:
        budgets.append(limits.max_sampled_tokens - sampled_tokens)
    return min((budget for budget in budgets if budget is not None), default=None)


async def do_single_rollout(
    policy: TokenCompleter, env: Env, limits: RolloutLimits | None = None, opening: Opening | None = None
) -> Trajectory:
    """Observe, act, step, until the environment is done or a limit is met. A turn under way at the time limit is lost;
    the turns before it are kept."""
    run = _Run(policy, env, limits or RolloutLimits())
    try:
        async with asyncio.timeout(run.limits.rollout_timeout_seconds) as clock:
            reason = await run.play(opening)
    except TimeoutError:
        if not clock.expired():
            raise  # the environment's own, or a sampling call's
        reason = StopReason.ROLLOUT_TIMEOUT
    return Trajectory(run.transitions, run.ob, reason)


# --------------------------------------------------------------------------------------------------------------------
# Groups


async def open_group(
    policy: TokenCompleter, envs: Sequence[Env], limits: RolloutLimits
) -> list[Opening | BaseException]:
    """The first observation of every environment (or why it failed to give one) and, where all are the same prompt, the
    first answers from one request: the prompt is read once and one message crosses the network, not one per member."""
    first_G = await asyncio.gather(*(env.initial_observation() for env in envs), return_exceptions=True)
    openings_G = [first if isinstance(first, BaseException) else Opening(first) for first in first_G]
    prompts = {(tuple(first[0].to_ints()), repr(first[1])) for first in first_G if isinstance(first, tuple)}
    if len(prompts) != 1 or not all(isinstance(first, tuple) for first in first_G):
        return openings_G
    ob, stop = first_G[0]  # type: ignore[misc]
    budget = turn_budget(limits, ob, 0)
    if budget is not None and budget < 1:
        return openings_G
    try:
        async with asyncio.timeout(limits.sampling_turn_timeout_seconds):
            actions_G = await policy.complete_many(ob, stop, len(envs), max_tokens=budget)
    except Exception as error:
        logger.warning("Sampling a group at once failed (%s); its members will try one by one.", error)
        return openings_G
    return [Opening((ob, stop), action) for action in actions_G]


async def do_group_rollout(
    env_group_builder: EnvGroupBuilder,
    policy: TokenCompleter,
    strategy: RolloutStrategy | None = None,
    termination: TerminationRewardPolicy | None = None,
    limits: RolloutLimits | None = None,
) -> TrajectoryGroup:
    """All members of a group at once, then the group's rewards, then its cleanup, come what may."""
    strategy, limits = strategy or FailFast(), limits or RolloutLimits()
    termination = termination or TerminationRewardPolicy()
    try:
        envs = list(await env_group_builder.make_envs())
        # A rollout's clock starts before its first turn, so with one the members open by themselves.
        together = len(envs) > 1 and limits.rollout_timeout_seconds is None
        openings = await open_group(policy, envs, limits) if together else [None] * len(envs)

        async def attempt(member: int, failures: int) -> Trajectory:
            opening = None if failures else openings[member]
            if isinstance(opening, BaseException):
                raise opening
            if failures:
                envs[member] = list(await env_group_builder.make_envs())[member]
            return await do_single_rollout(policy.for_member(member, failures), envs[member], limits, opening)

        collected = await strategy.collect(attempt, len(envs))
        trajectories_G = list(collected.finished.values())
        rewards_G, metrics_G = await _grade(
            env_group_builder, trajectories_G, [envs[member] for member in collected.finished], termination
        )
        return TrajectoryGroup(trajectories_G, rewards_G, metrics_G, collected.errors)
    finally:
        await env_group_builder.cleanup()


async def try_group_rollout(
    env_group_builder: EnvGroupBuilder,
    policy: TokenCompleter,
    strategy: RolloutStrategy,
    termination: TerminationRewardPolicy | None = None,
    limits: RolloutLimits | None = None,
) -> TrajectoryGroup | list[RolloutError]:
    """A group, or the errors of one that a tolerant strategy lets a run do without."""
    try:
        return await do_group_rollout(env_group_builder, policy, strategy, termination, limits)
    except Exception as error:
        if not strategy.catches_group_errors:
            raise
        logger.warning("Skipping a group: %s: %s", type(error).__name__, error)
        return error.errors if isinstance(error, GroupFailed) else [RolloutError.of(error)]


async def _grade(
    builder: EnvGroupBuilder,
    trajectories_G: list[Trajectory],
    envs_G: Sequence[Env],
    termination: TerminationRewardPolicy,
) -> tuple[list[float], list[Metrics]]:
    limited_G = [
        termination.zero_reward_on_limit and trajectory.stop_reason in termination.limit_stop_reasons
        for trajectory in trajectories_G
    ]
    timed_out = all(trajectory.stop_reason == StopReason.ROLLOUT_TIMEOUT for trajectory in trajectories_G)
    if termination.skip_grading_on_timeout and timed_out and all(limited_G):
        graded_G: list[tuple[float, Metrics]] = [(0.0, {}) for _ in trajectories_G]
    else:
        async with asyncio.timeout(termination.grader_timeout_seconds):
            graded_G = await builder.compute_group_rewards(trajectories_G, envs_G)
    rewards_G, metrics_G = [], []
    for trajectory, limited, (reward, metrics) in zip(trajectories_G, limited_G, graded_G, strict=True):
        from_steps = sum(transition.reward for transition in trajectory.transitions)
        if limited and from_steps + reward > 0:
            reward, metrics = -from_steps, {**metrics, "zero_reward_on_limit": 1.0}
        rewards_G.append(reward)
        metrics_G.append(metrics)
    return rewards_G, metrics_G
