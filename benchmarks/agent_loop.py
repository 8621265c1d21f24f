"""A loop over episodes of several turns as users write them: a calculator to ask, the reward at the end. With faults
planted in it, and without; the third lot, made up after the checks for the others were done."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from own_loop import Addition, Loop, Problem, datum_of
from own_loop_faults import OwnLoop

from mint.rl.calculator import evaluate
from mint.types import Datum, ModelInput, SampledSequence, SamplingParams

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
Turn = tuple[list[int], SampledSequence]
"""A prompt and what was sampled after it."""


class Arithmetic(Addition):
    max_tokens = 32

    def draw(self, rng: random.Random) -> Problem:
        return rng.randint(2, 999), rng.choice("+-*"), rng.randint(2, 999)

    def question(self, problem: Problem) -> str:
        return f"What is {problem[0]} {problem[1]} {problem[2]}?"

    def answer(self, problem: Problem) -> str:
        return str(evaluate(f"{problem[0]} {problem[1]} {problem[2]}"))


class Agent(Loop):
    task = Arithmetic()
    group, tests = 6, 24

    def prompt(self, problem: Problem) -> list[int]:
        messages = [{"role": "user", "content": self.task.question(problem)}]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.tokenizer.encode(text)

    def reward(self, text: str, problem: Problem) -> float:
        numbers = re.findall(r"-?\d+", text)
        return float(bool(numbers) and numbers[-1] == self.task.answer(problem))

    def train(self, step: int, problems: list[Problem]) -> None:
        episodes, rewards = [], []
        for number, problem in enumerate(problems):
            episodes.append(self.play(self.sampler, self.prompt(problem), self.group, self.params(step, number)))
            rewards.append([self.score(turns, problem, (step, number)) for turns in episodes[-1]])
        data: list[Datum] = []
        for group, earned, advantages in zip(episodes, rewards, self.advantages(rewards), strict=True):
            if min(earned) < max(earned):
                for turns, advantage in zip(group, advantages, strict=True):
                    data += self.data(turns, advantage)
        self.update(step, data)

    def play(self, sampler: Any, prompt: list[int], count: int, params: SamplingParams) -> list[list[Turn]]:
        episodes = []
        for number, first in enumerate(sampler.sample(ModelInput.from_ints(prompt), count, params).result().sequences):
            turns = [(prompt, first)]
            if call := CALL.search(self.tokenizer.decode(first.tokens, skip_special_tokens=True)):
                after = self.after(prompt, first, self.tool(call.group(1)))
                again = replace(params, seed=100 * (params.seed or 0) + number + 1)
                turns.append((after, sampler.sample(ModelInput.from_ints(after), 1, again).result().sequences[0]))
            episodes.append(turns)
        return episodes

    def score(self, turns: list[Turn], problem: Problem, group: object) -> float:
        text = self.graded(turns)
        reward = self.earned(turns, text, problem)
        self.recorder.score(
            [sequence for _, sequence in turns], reward, response=text, reference=self.reference(problem),
            problem=repr(problem), group=group,
        )  # fmt: skip
        return reward

    def evaluate(self) -> None:
        sampler = self.trainer.save_weights_and_get_sampling_client()
        with self.recorder.evaluation():
            for number, problem in enumerate(self.drawn(random.Random(99), self.tests, held_out=True)):
                params = SamplingParams(max_tokens=self.task.max_tokens, seed=number)
                self.score(self.play(sampler, self.prompt(problem), 1, params)[0], problem, number)

    # ------------------------------------------------------------------------------------------------ to get wrong

    def tool(self, expression: str) -> str:
        try:
            return str(evaluate(expression))
        except (ValueError, ArithmeticError, SyntaxError) as error:
            return f"error: {error}"

    def after(self, prompt: list[int], said: SampledSequence, result: str) -> list[int]:
        text = f"\n<|im_start|>user\n<tool_response>{result}</tool_response><|im_end|>\n<|im_start|>assistant\n"
        return prompt + said.tokens + self.tokenizer.encode(text)

    def graded(self, turns: list[Turn]) -> str:
        return self.tokenizer.decode(turns[-1][1].tokens, skip_special_tokens=True)

    def earned(self, turns: list[Turn], text: str, problem: Problem) -> float:
        return self.reward(text, problem)

    def data(self, turns: list[Turn], advantage: float) -> list[Datum]:
        """One datum, its environment's tokens without an advantage."""
        whole = turns[-1][0] + turns[-1][1].tokens
        logprobs, advantages = [0.0] * (len(whole) - 1), [0.0] * (len(whole) - 1)
        for prompt, sequence in turns:
            where = slice(len(prompt) - 1, len(prompt) - 1 + len(sequence.tokens))
            logprobs[where], advantages[where] = sequence.logprobs or [], [advantage] * len(sequence.tokens)
        inputs = {"target_tokens": whole[1:], "logprobs": logprobs, "advantages": advantages}
        return [Datum(ModelInput.from_ints(whole[:-1]), inputs)]


class ToolInTheLoss(Agent):
    def data(self, turns: list[Turn], advantage: float) -> list[Datum]:
        return from_turn(super().data(turns, advantage)[0], turns[0], advantage)


class LastTurnOnly(Agent):
    def data(self, turns: list[Turn], advantage: float) -> list[Datum]:
        return from_turn(super().data(turns, advantage)[0], turns[-1], advantage)


def from_turn(datum: Datum, turn: Turn, advantage: float) -> list[Datum]:
    """With the advantage on everything from this turn on."""
    inputs, before = datum.loss_fn_inputs, len(turn[0]) - 1
    advantages = [0.0] * before + [advantage] * (datum.model_input.length - before)
    return [Datum(datum.model_input, {**inputs, "advantages": advantages})]


class ToolFails(Agent):
    def tool(self, expression: str) -> str:
        return "error: the calculator is not available"


class ToolIsOff(Agent):
    def tool(self, expression: str) -> str:
        right = super().tool(expression)
        return str(int(right) + 1) if right.lstrip("-").isdigit() else right


class GradedTooEarly(Agent):
    def graded(self, turns: list[Turn]) -> str:
        return super().graded(turns[:1])


class CallsArePaid(Agent):
    def earned(self, turns: list[Turn], text: str, problem: Problem) -> float:
        return float(len(turns) > 1)


class TurnByTurn(Agent):
    """A datum a turn, as where prompts do not continue the conversation."""

    seed = 32

    def data(self, turns: list[Turn], advantage: float) -> list[Datum]:
        return [datum_of(prompt, sequence.tokens, sequence.logprobs or [], advantage) for prompt, sequence in turns]


AGENT_FAULTS = [
    OwnLoop("agent, the tool's answer in the loss", "mask", ToolInTheLoss),
    OwnLoop("agent, only the last turn trained", "mask", LastTurnOnly),
    OwnLoop("agent, the tool fails", "all_wrong", ToolFails),
    OwnLoop("agent, the tool is off by one", "all_wrong", ToolIsOff, missed=True),
    OwnLoop("agent, graded before the end", "all_wrong", GradedTooEarly),
    OwnLoop("agent, paid for calling the tool", "reward_hacking", CallsArePaid),
]
AGENT_CLEAN = [
    OwnLoop("agent, seed 30", "", type("Agent30", (Agent,), {"seed": 30})),
    OwnLoop("agent, slowly, seed 31", "", type("Agent31", (Agent,), {"seed": 31, "rate": 3e-4})),
    OwnLoop("agent, a datum a turn", "", TurnByTurn),
]
