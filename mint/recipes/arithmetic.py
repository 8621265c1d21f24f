"""Sums, differences and small products after a worked example, scored by an exact verifier."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

from mint.recipes.tasks import TaskBuilder
from mint.rl.answers import exact_match
from mint.rl.calculator import evaluate
from mint.rl.config import Config
from mint.rl.envs import ProblemEnv, ProblemGroupBuilder
from mint.rl.renderers import PlainRenderer
from mint.rl.types import EnvGroupBuilder

WORKED = "Q: What is 4 + 5?\nA: 9\n"


class ArithmeticEnv(ProblemEnv):
    """One expression; the right value on the first line earns 1."""

    def __init__(self, expression: str, tokenizer: Any) -> None:
        super().__init__(PlainRenderer(tokenizer, ("\n",)), format_coef=0.0)
        self.expression = expression

    def get_question(self) -> str:
        return f"{WORKED}Q: What is {self.expression}?\nA:"

    def check_answer(self, sample_str: str) -> float:
        return exact_match(sample_str, evaluate(self.expression))

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return str(evaluate(self.expression))


@dataclass(frozen=True)
class ArithmeticDatasetBuilder(TaskBuilder[str]):
    largest: int = 99
    """Of the numbers in sums and differences; products stay below 10."""

    def draw(self, rng: random.Random) -> str:
        operator = rng.choice("+-*")
        low, high = (1, 9) if operator == "*" else (0, self.largest)
        first, second = rng.randint(low, high), rng.randint(low, high)
        if operator == "-":
            first, second = max(first, second), min(first, second)
        return f"{first} {operator} {second}"

    def name(self, problem: str) -> str:
        return problem

    def group(self, problem: str, tokenizer: Any, size: int) -> EnvGroupBuilder:
        return ProblemGroupBuilder(partial(ArithmeticEnv, problem, tokenizer), size, "arithmetic")


CONFIG = Config(
    model_name="mint/tiny",
    recipe_name="math",
    dataset_builder=ArithmeticDatasetBuilder(),
    learning_rate=1e-3,
    lora_rank=16,
    max_tokens=8,
    eval_every=5,
    save_every=5,
    log_path="runs/math",
)
