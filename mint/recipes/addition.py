"""Additions of two numbers below 100, in the form the bundled model knows: a problem, a dataset, a configuration.

The recipe to copy for a task of your own: `ProblemEnv` has four short methods to fill in.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from mint.recipes.tasks import TaskBuilder, held_out
from mint.rl.config import Config
from mint.rl.envs import ProblemEnv, ProblemGroupBuilder
from mint.rl.renderers import PlainRenderer
from mint.rl.types import EnvGroupBuilder

Problem = tuple[int, int]


def prompt_of(problem: Problem) -> str:
    return f"Q: What is {problem[0]} + {problem[1]}?\nA:"


def answer_of(problem: Problem) -> str:
    return f" {sum(problem)}"


def wrong_answer_of(problem: Problem, rng: random.Random) -> str:
    """A mistake somebody might make: off by a little, or by a ten."""
    return f" {max(0, sum(problem) + rng.choice([-10, -9, -2, -1, 1, 2, 9, 10]))}"


def reward_of(text: str, problem: Problem) -> float:
    found = re.search(r"-?\d+", text)
    return 1.0 if found and int(found.group()) == sum(problem) else 0.0


def name_of(problem: Problem) -> str:
    low, high = sorted(problem)
    return f"{low} + {high}"


def is_held_out(problem: Problem) -> bool:
    """A tenth of all additions, by their name: the same in every process, and never trained on."""
    return held_out(name_of(problem))


class AdditionEnv(ProblemEnv):
    """One question, one answer; a right one earns 1."""

    def __init__(self, problem: Problem, tokenizer: Any) -> None:
        super().__init__(PlainRenderer(tokenizer), format_coef=0.0)
        self.problem = problem

    def get_question(self) -> str:
        return prompt_of(self.problem)

    def check_answer(self, sample_str: str) -> float:
        return reward_of(sample_str, self.problem)

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return str(sum(self.problem))


@dataclass(frozen=True)
class AdditionDatasetBuilder(TaskBuilder[Problem]):
    def draw(self, rng: random.Random) -> Problem:
        return rng.randint(0, 99), rng.randint(0, 99)

    def name(self, problem: Problem) -> str:
        return name_of(problem)

    def group(self, problem: Problem, tokenizer: Any, size: int) -> EnvGroupBuilder:
        return ProblemGroupBuilder(partial(AdditionEnv, problem, tokenizer), size, "addition")


def draw_problems(rng: random.Random, count: int, held_out: bool = False) -> list[Problem]:
    return AdditionDatasetBuilder().draw_many(rng, count, held_out)


CONFIG = Config(
    model_name="mint/tiny",
    recipe_name="addition",
    dataset_builder=AdditionDatasetBuilder(),
    learning_rate=1e-3,
    lora_rank=16,
    max_tokens=8,
    eval_every=5,
    save_every=5,
    log_path="runs/addition",
)
