import asyncio
import pickle
from functools import partial

import numpy as np
import pytest

from mint.rl.completers import SamplingTokenCompleter
from mint.rl.envs import EnvFromMessageEnv, MessageEnv, MessageStepResult, ParseError, ProblemEnv, ProblemGroupBuilder
from mint.rl.renderers import ChatRenderer, PlainRenderer
from mint.rl.rollout_limits import ParseErrorPolicy
from mint.rl.rollouts import do_group_rollout
from mint.rl.types import InitialObservationOverflow, Message, StepResult, StopReason
from tests.rl.fakes import ALPHABET, CharTokenizer, FakeSamplingClient

TOKENIZER = CharTokenizer()


class Addition(ProblemEnv):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(PlainRenderer(TOKENIZER))
        self.a, self.b = a, b

    def get_question(self) -> str:
        return f"Q: What is {self.a} + {self.b}?\nA:"

    def check_answer(self, sample_str: str) -> bool:
        return sample_str.strip() == str(self.a + self.b)

    def check_format(self, sample_str: str) -> bool:
        return sample_str.strip().isdigit()

    def get_reference_answer(self) -> str:
        return str(self.a + self.b)


def answer(env: ProblemEnv, text: str) -> StepResult:
    return asyncio.run(env.step(TOKENIZER.encode(text)))


@pytest.mark.parametrize(
    ("text", "reward"), [(" 8\x00", 1.0), (" 9\x00", 0.0), (" eight\x00", -0.1), (" 8", 0.9), ("\x00", -0.1)]
)
def test_reward_is_correctness_with_a_price_on_bad_form(text: str, reward: float) -> None:
    step = answer(Addition(3, 5), text)
    assert step.reward == pytest.approx(reward)
    assert step.episode_done
    assert step.logs["reference"] == "8"


def test_the_gold_answer_earns_one() -> None:
    for a in range(5):
        env = Addition(a, 7)
        assert answer(env, f" {env.get_reference_answer()}\x00").reward == 1.0


def test_a_problem_keeps_its_name_and_survives_pickling() -> None:
    builder = ProblemGroupBuilder(partial(Addition, 3, 5), 4, "sums")
    again = pickle.loads(pickle.dumps(builder))
    assert again.problem_id() == builder.problem_id() != ProblemGroupBuilder(partial(Addition, 3, 6), 4).problem_id()
    assert builder.logging_tags() == ["sums"]


def test_a_group_of_problems_runs_on_a_sampling_client() -> None:
    table = np.random.default_rng(0).normal(size=(len(ALPHABET), len(ALPHABET)))
    client = FakeSamplingClient(table)
    policy = SamplingTokenCompleter(client, max_tokens=6, seed=3)
    group = asyncio.run(do_group_rollout(ProblemGroupBuilder(partial(Addition, 3, 5), 4), policy))
    assert len(group.trajectories_G) == 4
    assert [count for _, count, _ in client.requests] == [4]
    again = asyncio.run(
        do_group_rollout(ProblemGroupBuilder(partial(Addition, 3, 5), 4), SamplingTokenCompleter(client, 6, seed=3))
    )
    assert [t.transitions[0].ac for t in again.trajectories_G] == [t.transitions[0].ac for t in group.trajectories_G]


# ------------------------------------------------------------------------------------------------------- conversations


class Echo(MessageEnv):
    """Says back what it hears until it hears "bye"; words with "x" cannot be read."""

    def __init__(self) -> None:
        self.messages: list[Message] = [{"role": "user", "content": "hi"}]

    async def initial_observation(self) -> list[Message]:
        return list(self.messages)

    async def add_messages(self, messages: list[Message]) -> list[Message]:
        self.messages += messages
        return list(self.messages)

    async def step(self, message: Message) -> MessageStepResult:
        if "x" in message["content"]:
            raise ParseError("an x")
        self.messages += [message, {"role": "user", "content": message["content"]}]
        done = message["content"] == "bye"
        return MessageStepResult(1.0 if done else 0.0, done, list(self.messages), {"words": 1.0})


def env(**options: object) -> EnvFromMessageEnv:
    made = EnvFromMessageEnv(ChatRenderer(TOKENIZER), Echo(), **options)  # type: ignore[arg-type]
    asyncio.run(made.initial_observation())
    return made


def say(to: EnvFromMessageEnv, text: str, stop: str = "stop") -> StepResult:
    return asyncio.run(to.step(TOKENIZER.encode(text), extra={"stop_reason": stop}))  # type: ignore[typeddict-item]


def test_a_conversation_goes_on_until_it_is_done() -> None:
    talk = env()
    step = say(talk, "hello\x00")
    assert not step.episode_done
    assert TOKENIZER.decode(step.next_observation.to_ints()) == "<user>hi<assistant>hello<user>hello<assistant>"
    assert step.next_stop_condition == [0]
    end = say(talk, "bye\x00")
    assert (end.episode_done, end.reward, end.metrics) == (True, 1.0, {"words": 1.0})


def test_a_turn_cut_off_ends_the_episode() -> None:
    step = say(env(context_overflow_reward=-0.3), "hel", "length")
    assert (step.reward, step.episode_done, step.stop_reason) == (-0.3, True, StopReason.MAX_TOKENS)


@pytest.mark.parametrize("said", ["hello", "axe\x00"])
def test_by_default_what_cannot_be_read_costs_one_and_ends_the_episode(said: str) -> None:
    step = say(env(), said)
    assert (step.reward, step.episode_done, step.stop_reason) == (-1.0, True, StopReason.PARSE_ERROR)
    assert step.train_on_action


def test_a_policy_may_answer_unreadable_turns_with_a_correction() -> None:
    talk = env(parse_errors=ParseErrorPolicy(2, "Error: {details}", 0.2, -0.5, mask_error_turns=True))
    step = say(talk, "axe\x00")
    assert (step.reward, step.episode_done, step.train_on_action) == (-0.2, False, False)
    shown = TOKENIZER.decode(step.next_observation.to_ints())
    assert shown == "<user>hi<assistant>axe<user>Error: an x<assistant>"
    say(talk, "axe\x00")
    end = say(talk, "axe\x00")
    assert (end.reward, end.stop_reason) == (-0.5, StopReason.PARSE_ERROR)


def test_a_readable_turn_resets_the_count() -> None:
    talk = env(parse_errors=ParseErrorPolicy(1))
    assert [say(talk, said).episode_done for said in ("axe\x00", "ok\x00", "axe\x00", "axe\x00")] == [
        False, False, False, True,
    ]  # fmt: skip


def test_without_an_end_a_turn_is_never_retried() -> None:
    assert say(env(parse_errors=ParseErrorPolicy(5)), "axe").episode_done


def test_a_conversation_that_outgrows_the_context_ends() -> None:
    talk = env(max_trajectory_tokens=60, max_generation_tokens=10)
    step = say(talk, "hello hello\x00")
    assert (step.reward, step.stop_reason) == (-0.1, StopReason.CONTEXT_OVERFLOW)
    assert step.metrics == {"words": 1.0, "context_overflow": 1.0}
    end = say(env(max_trajectory_tokens=60, max_generation_tokens=10), "bye\x00")
    assert (end.reward, end.stop_reason) == (1.0, None)  # done in time: its own reward stands


def test_a_first_prompt_that_does_not_fit_fails_nothing() -> None:
    made = EnvFromMessageEnv(ChatRenderer(TOKENIZER), Echo(), max_trajectory_tokens=5)
    first = asyncio.run(made.initial_observation())
    assert isinstance(first, InitialObservationOverflow)
    assert first.reward == -0.1
