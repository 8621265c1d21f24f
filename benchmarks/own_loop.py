"""A loop as users write them, on the raw client and recorded by `mint.rl.recorder`, with a method for everything that
can go wrong; own_loop_faults.py overrides them."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import mint
from mint.rl.recorder import Recorder
from mint.rl.rundir import RunDir
from mint.types import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

Problem = tuple[Any, ...]


class Addition:
    max_tokens = 8

    def draw(self, rng: random.Random) -> Problem:
        return rng.randint(0, 99), rng.randint(0, 99)

    def question(self, problem: Problem) -> str:
        return f"Q: What is {problem[0]} + {problem[1]}?\nA:"

    def answer(self, problem: Problem) -> str:
        return str(problem[0] + problem[1])

    def is_held_out(self, problem: Problem) -> bool:
        return zlib.crc32(self.question(problem).encode()) % 10 == 0


class OneLiners(Addition):
    """One-line Python functions, right if they are the reference to the letter."""

    max_tokens = 48
    worked = "Q: Write a Python function f(x) that returns x plus 3.\nA: def f(x): return x + 3\n"
    functions = (
        ("x", "x plus {k}", "x + {k}"),
        ("x", "x times {k}", "x * {k}"),
        ("x", "the remainder of x divided by {k}", "x % {k}"),
        ("x", "the absolute value of x", "abs(x)"),
        ("s", "s reversed", "s[::-1]"),
        ("s", "s in upper case", "s.upper()"),
        ("xs", "the sum of xs", "sum(xs)"),
        ("xs", "xs sorted", "sorted(xs)"),
    )

    def draw(self, rng: random.Random) -> Problem:
        return rng.choice(("g", "solve", "compute", "helper")), rng.randint(2, 20), rng.choice(self.functions)

    def question(self, problem: Problem) -> str:
        name, k, (argument, wanted, _) = problem
        wanted = wanted.format(k=k)
        return f"{self.worked}Q: Write a Python function {name}({argument}) that returns {wanted}.\nA:"

    def answer(self, problem: Problem) -> str:
        name, k, (argument, _, expression) = problem
        return f"def {name}({argument}): return {expression.format(k=k)}"


class Loop:
    """GRPO with a group mean; class attributes are its settings."""

    task: Addition = Addition()
    steps, batch, group = 12, 8, 4
    rate = 1e-3
    temperature = 1.0
    top_p = 1.0
    loss_fn = "importance_sampling"
    seed = 0
    tests = 32
    """Held-out problems evaluated every five steps; 0: none."""
    says_reference = True

    def run(self, folder: Path, service: mint.ServiceClient) -> RunDir:
        self.service = service
        self.rng = random.Random(self.seed)
        self.recorder = Recorder(folder, {"seed": self.seed}, say=lambda text: None)
        self.client = service.create_lora_training_client("mint/tiny", rank=16, seed=self.seed)
        self.trainer = self.recorder.watch(self.client)
        self.tokenizer = self.trainer.get_tokenizer()
        for step in range(self.steps):
            self.begin(step)
            self.refresh(step)
            if step % 5 == 0:
                self.evaluate()
            self.train(step, self.problems(step))
            self.recorder.end_step()
        self.evaluate()
        return self.recorder.run_dir

    def train(self, step: int, problems: list[Problem]) -> None:
        prompts = [self.prompt(problem) for problem in problems]
        asked = [
            self.sampler.sample(ModelInput.from_ints(prompt), self.group, self.params(step, number))
            for number, prompt in enumerate(prompts)
        ]
        answers = [answer.result().sequences for answer in asked]
        rewards = [self.grade(problem, group) for problem, group in zip(problems, answers, strict=True)]
        data = [
            self.datum(prompt, sequence, advantage)
            for prompt, group, earned, advantages in zip(
                prompts, answers, rewards, self.advantages(rewards), strict=True
            )
            if min(earned) < max(earned)
            for sequence, advantage in zip(group, advantages, strict=True)
        ]
        self.update(step, self.kept(data))

    def grade(self, problem: Problem, group: list[SampledSequence]) -> list[float]:
        rewards = []
        for sequence in group:
            text = self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            rewards.append(self.reward(text, problem))
            reference = self.reference(problem) if self.says_reference else None
            self.recorder.score(sequence, rewards[-1], response=text, reference=reference, problem=repr(problem))
        return rewards

    def evaluate(self) -> None:
        if not self.tests:
            return
        problems = self.drawn(random.Random(99), self.tests, held_out=True)
        sampler = self.trainer.save_weights_and_get_sampling_client()
        with self.recorder.evaluation():
            params = [SamplingParams(max_tokens=self.task.max_tokens, seed=n) for n in range(self.tests)]
            asked = [
                sampler.sample(ModelInput.from_ints(self.prompt(problem)), 1, one)
                for problem, one in zip(problems, params, strict=True)
            ]
            for problem, answer in zip(problems, asked, strict=True):
                self.grade(problem, answer.result().sequences)

    def drawn(self, rng: random.Random, count: int, held_out: bool) -> list[Problem]:
        found: list[Problem] = []
        while len(found) < count:
            problem = self.task.draw(rng)
            if self.task.is_held_out(problem) == held_out:
                found.append(problem)
        return found

    # ------------------------------------------------------------------------------------------------ to get wrong

    def begin(self, step: int) -> None:
        pass

    def refresh(self, step: int) -> None:
        self.sampler = self.trainer.save_weights_and_get_sampling_client()

    def problems(self, step: int) -> list[Problem]:
        return self.drawn(self.rng, self.batch, held_out=False)

    def prompt(self, problem: Problem) -> list[int]:
        return self.tokenizer.encode(self.task.question(problem))

    def params(self, step: int, number: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.task.max_tokens, temperature=self.temperature, top_p=self.top_p,
            seed=10**6 * self.seed + 1000 * step + number,
        )  # fmt: skip

    def reference(self, problem: Problem) -> str:
        return self.task.answer(problem)

    def reward(self, text: str, problem: Problem) -> float:
        return float(text.strip() == self.reference(problem))

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        return [[reward - sum(group) / len(group) for reward in group] for group in rewards]

    def datum(self, prompt: list[int], sequence: SampledSequence, advantage: float) -> Datum:
        return datum_of(prompt, sequence.tokens, sequence.logprobs or [], advantage)

    def kept(self, data: list[Datum]) -> list[Datum]:
        return data

    def update(self, step: int, data: list[Datum]) -> None:
        if data:
            self.trainer.forward_backward(data, self.loss_fn)
            self.trainer.optim_step(AdamParams(learning_rate=self.rate_at(step))).result()

    def rate_at(self, step: int) -> float:
        return self.rate


def datum_of(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> Datum:
    whole, before = prompt + tokens, [0.0] * (len(prompt) - 1)
    return Datum(
        ModelInput.from_ints(whole[:-1]),
        {
            "target_tokens": whole[1:],
            "logprobs": before + logprobs,
            "advantages": before + [advantage] * len(tokens),
        },
    )
