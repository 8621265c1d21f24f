"""The two common shapes of environment: a question with a checkable answer, and a conversation.

`ProblemEnv` is one question, one answer. `MessageEnv` speaks messages over several turns, and `EnvFromMessageEnv` makes
it an `Env` that speaks tokens. Conversations with tools are in `mint.rl.tools`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mint.errors import MintError
from mint.rl.hashing import stable_hash
from mint.rl.renderers import Renderer
from mint.rl.rollout_limits import ParseErrorPolicy
from mint.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    InitialObservationOverflow,
    Logs,
    Message,
    Metrics,
    Observation,
    StepResult,
    StopCondition,
    StopReason,
)
from mint.types import ModelInput

# --------------------------------------------------------------------------------------------------------------------
# One question, one answer


class ProblemEnv(Env):
    """Reward: correct + format_coef * (format - 1), so a right answer in the right form earns 1."""

    def __init__(
        self, renderer: Renderer, convo_prefix: Sequence[Message] | None = None, format_coef: float = 0.1
    ) -> None:
        self.renderer = renderer
        self.convo_prefix = list(convo_prefix or [])
        self.format_coef = format_coef

    @abstractmethod
    def get_question(self) -> str: ...

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool | float:
        """True or 1 for right, anything between for partial credit."""

    @abstractmethod
    def check_format(self, sample_str: str) -> bool | float: ...

    @abstractmethod
    def get_reference_answer(self) -> str:
        """For people to read beside the sample."""

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        messages = [*self.convo_prefix, {"role": "user", "content": self.get_question()}]
        return self.renderer.build_generation_prompt(messages), self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        message, ended = self.renderer.parse_response(action)
        text = message["content"]
        well_formed = float(self.check_format(text)) if ended else 0.0
        correct = float(self.check_answer(text))
        return StepResult(
            reward=self.format_coef * (well_formed - 1) + correct,
            episode_done=True,
            next_observation=ModelInput.empty(),
            next_stop_condition=None,
            metrics={"format": well_formed, "correct": correct},
            logs={"question": self.get_question(), "response": text, "reference": self.get_reference_answer()},
        )


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """`num_envs` fresh copies of one problem."""

    env_thunk: Callable[[], ProblemEnv]
    num_envs: int
    dataset_name: str = "problems"

    async def make_envs(self) -> Sequence[Env]:
        return [self.env_thunk() for _ in range(self.num_envs)]

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]

    def problem_id(self) -> str:
        return f"{stable_hash(self.env_thunk().get_question()):08x}"


# --------------------------------------------------------------------------------------------------------------------
# Conversations


class ParseError(MintError, ValueError):
    """Raised by `MessageEnv.step` for a message it cannot make sense of; the parse-error policy says what follows."""


@dataclass
class MessageStepResult:
    """A conversation's answer to an assistant message."""

    reward: float
    episode_done: bool
    next_messages: list[Message]
    """The whole conversation so far."""
    metrics: Metrics = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    next_stop_condition: StopCondition = None
    """None: the renderer's."""
    stop_reason: StopReason | None = None


class MessageEnv(ABC):
    """One episode of conversation."""

    @abstractmethod
    async def initial_observation(self) -> list[Message]: ...

    @abstractmethod
    async def step(self, message: Message) -> MessageStepResult:
        """May raise `ParseError`, leaving the conversation as it was."""

    async def add_messages(self, messages: list[Message]) -> list[Message] | None:
        """Appends messages from outside, such as a correction, and returns the whole conversation. None: it cannot, and
        then an unreadable message ends the episode."""
        return None


class EnvFromMessageEnv(Env):
    """A `MessageEnv` in tokens."""

    def __init__(
        self,
        renderer: Renderer,
        message_env: MessageEnv,
        failed_parse_reward: float = -1.0,
        terminate_on_parse_error: bool = True,
        max_trajectory_tokens: int | None = None,
        max_generation_tokens: int = 0,
        context_overflow_reward: float = -0.1,
        parse_errors: ParseErrorPolicy | None = None,
    ) -> None:
        """`max_generation_tokens` are kept free after every prompt of at most `max_trajectory_tokens`. The first two
        rewards' settings are the short way to say `parse_errors`, which replaces them when given."""
        self.renderer = renderer
        self.message_env = message_env
        self.max_trajectory_tokens = max_trajectory_tokens
        self.max_generation_tokens = max_generation_tokens
        self.context_overflow_reward = context_overflow_reward
        self.parse_errors = parse_errors or ParseErrorPolicy(
            max_consecutive=0 if terminate_on_parse_error else 2**31,
            penalty_per_error=max(0.0, -failed_parse_reward),
            terminal_reward=failed_parse_reward,
        )
        self._errors_in_a_row = 0

    async def initial_observation(self) -> tuple[Observation, StopCondition] | InitialObservationOverflow:
        observation = self.renderer.build_generation_prompt(await self.message_env.initial_observation())
        if self._overflows(observation):
            return InitialObservationOverflow(
                self.context_overflow_reward, {"context_overflow": 1.0}, {"prompt_tokens": observation.length}
            )
        return observation, self.renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        if extra is not None and extra.get("stop_reason") == "length":
            return self._end(self.context_overflow_reward, StopReason.MAX_TOKENS, {"max_tokens_reached": 1.0})
        message, ended = self.renderer.parse_response(action)
        if not ended:
            return self._unreadable("the message was not ended", message)
        try:
            step = await self.message_env.step(message)
        except ParseError as error:
            return await self._try_again(str(error), message)
        self._errors_in_a_row = 0
        if step.episode_done:
            result = self._end(step.reward, step.stop_reason, step.metrics, step.logs)
            result.next_observation = self.renderer.build_generation_prompt(step.next_messages)
            return result
        return self._go_on(step.reward, step.next_messages, step.metrics, step.logs, step.next_stop_condition)

    async def _try_again(self, details: str, message: Message) -> StepResult:
        self._errors_in_a_row += 1
        if self._errors_in_a_row > self.parse_errors.max_consecutive:
            return self._unreadable(details, message)
        correction = self.parse_errors.retry_message_template.format(details=details)
        messages = await self.message_env.add_messages([message, {"role": "user", "content": correction}])
        if messages is None:
            return self._unreadable(details, message)
        penalty = self.parse_errors.penalty_per_error
        step = self._go_on(-penalty, messages, {"parse_error": 1.0}, {"parse_error": details})
        step.train_on_action = not self.parse_errors.mask_error_turns
        return step

    def _unreadable(self, details: str, message: Message) -> StepResult:
        logs: Logs = {"parse_error": details, "response": str(message.get("content"))}
        step = self._end(self.parse_errors.terminal_reward, StopReason.PARSE_ERROR, {"parse_error": 1.0}, logs)
        step.train_on_action = not self.parse_errors.mask_error_turns
        return step

    def _go_on(
        self, reward: float, messages: list[Message], metrics: Metrics, logs: Logs, stop: StopCondition = None
    ) -> StepResult:
        observation = self.renderer.build_generation_prompt(messages)
        if self._overflows(observation):
            metrics = {**metrics, "context_overflow": 1.0}
            return self._end(self.context_overflow_reward, StopReason.CONTEXT_OVERFLOW, metrics, logs)
        return StepResult(reward, False, observation, stop or self.renderer.get_stop_sequences(), metrics, logs)

    def _end(self, reward: float, reason: StopReason | None, metrics: Metrics, logs: Logs | None = None) -> StepResult:
        return StepResult(reward, True, ModelInput.empty(), None, metrics, logs or {}, reason)

    def _overflows(self, observation: Observation) -> bool:
        if self.max_trajectory_tokens is None:
            return False
        return observation.length + self.max_generation_tokens > self.max_trajectory_tokens
