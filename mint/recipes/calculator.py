"""Arithmetic too large to guess, with a calculator to ask: the right answer at the end of the conversation earns 1.

Nobody shows the model how to call the tool; that asking pays is learned from the reward alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mint.recipes.tasks import TaskBuilder
from mint.rl.answers import exact_match
from mint.rl.calculator import calculator, evaluate
from mint.rl.config import Config
from mint.rl.envs import EnvFromMessageEnv
from mint.rl.renderers import ChatRenderer
from mint.rl.tools import ToolMessageEnv
from mint.rl.types import Env, EnvGroupBuilder

MAX_TURNS = 3


def reward(prompt: str, answer: str) -> float:
    return exact_match(answer, evaluate(prompt.removeprefix("What is ").removesuffix("?")))


@dataclass(frozen=True)
class CalculatorGroup(EnvGroupBuilder):
    """Several attempts at one question."""

    question: str
    renderer: ChatRenderer
    size: int

    async def make_envs(self) -> Sequence[Env]:
        return [EnvFromMessageEnv(self.renderer, self._talk(), failed_parse_reward=0.0) for _ in range(self.size)]

    def _talk(self) -> ToolMessageEnv:
        return ToolMessageEnv([{"role": "user", "content": self.question}], reward, [calculator], MAX_TURNS)

    def logging_tags(self) -> list[str]:
        return ["calculator"]

    def problem_id(self) -> str:
        return self.question


@dataclass(frozen=True)
class CalculatorDatasetBuilder(TaskBuilder[str]):
    groups_per_batch: int = 8
    num_batches: int = 12
    tests: int = 48

    def draw(self, rng: random.Random) -> str:
        return f"What is {rng.randint(11, 999)} {rng.choice('+-*')} {rng.randint(11, 999)}?"

    def name(self, problem: str) -> str:
        return problem

    def group(self, problem: str, tokenizer: Any, size: int) -> EnvGroupBuilder:
        return CalculatorGroup(problem, ChatRenderer(tokenizer, (calculator.spec(),)), size)


CONFIG = Config(
    model_name="mint/tiny",
    recipe_name="agentic",
    dataset_builder=CalculatorDatasetBuilder(),
    learning_rate=1e-3,
    lora_rank=16,
    max_tokens=32,
    eval_every=4,
    save_every=4,
    log_path="runs/agentic",
)
