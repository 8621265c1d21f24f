"""A folder of real runs of the bundled model, for looking at the dashboard and for its screenshots.

    python benchmarks/demo_runs.py runs/demo        # about five minutes on 2 CPU cores

Three seeds of addition with a KL term and a held-out set, an agent that may ask a calculator, and two runs with a fault
the doctor finds: answers cut off by `max_tokens`, and a learning rate that breaks the policy.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from math_rl import DEFAULT, AdditionDatasetBuilder

import mint
from mint.client.tokenizers import load_tokenizer
from mint.rl.answers import exact_match
from mint.rl.calculator import calculator, evaluate
from mint.rl.datasets import ListRLDataset
from mint.rl.envs import EnvFromMessageEnv
from mint.rl.renderers import ChatRenderer
from mint.rl.rewards import Reward, Term, Trace
from mint.rl.tools import ToolMessageEnv
from mint.rl.train import Config, train
from mint.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder


def right(prompt: str, answer: str) -> float:
    return exact_match(answer, evaluate(prompt.removeprefix("What is ").removesuffix("?")))


def extra_calls(prompt: str, answer: str, trace: Trace) -> float:
    return -min(max(len(trace["tool_calls"]) - 1, 0), 5) / 5


REWARD = Reward((Term("right", right), Term("extra_calls", extra_calls, weight=0.2, low=-1.0, high=0.0)))


@dataclass(frozen=True)
class CalculatorGroup(EnvGroupBuilder):
    question: str
    size: int
    renderer: ChatRenderer

    async def make_envs(self) -> Sequence[Env]:
        message = {"role": "user", "content": self.question}
        talks = [ToolMessageEnv([message], REWARD, [calculator], max_turns=3) for _ in range(self.size)]
        return [EnvFromMessageEnv(self.renderer, talk, failed_parse_reward=0.0) for talk in talks]

    def problem_id(self) -> str:
        return self.question


@dataclass(frozen=True)
class CalculatorDataset(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        rng, renderer = random.Random(0), ChatRenderer(load_tokenizer("mint/tiny"))
        asked = [f"What is {rng.randint(11, 999)} {rng.choice('+-*')} {rng.randint(11, 999)}?" for _ in range(48 + 24)]
        train_set = ListRLDataset([CalculatorGroup(question, 8, renderer) for question in asked[:48]], 6)
        test_set = ListRLDataset([CalculatorGroup(question, 1, renderer) for question in asked[48:]], 24, seed=None)
        return train_set, test_set


def configurations(folder: Path) -> list[Config]:
    addition = replace(
        DEFAULT,
        recipe_name="addition",
        dataset_builder=AdditionDatasetBuilder(group_size=8, num_batches=6, tests=60),
        learning_rate="cosine 8e-4 -> 1e-4, warmup 3",
        kl_penalty_coef=0.02,
        temperature="linear 1.0 -> 0.8",
        max_steps=30,
        eval_every=5,
        save_every=10,
        loggers=(),
    )
    agent = replace(
        addition,
        recipe_name="calculator",
        dataset_builder=CalculatorDataset(),
        learning_rate=1e-3,
        temperature=1.0,
        max_tokens=32,
        max_steps=16,
        eval_every=8,
    )
    runs = {f"addition/seed-{seed}": replace(addition, seed=seed) for seed in range(3)}
    runs["calculator"] = agent
    runs["addition-cut-off"] = replace(addition, max_tokens=2, max_steps=12, kl_penalty_coef=0.0)
    runs["addition-too-fast"] = replace(addition, learning_rate=0.05, max_steps=16, kl_penalty_coef=0.0)
    return [replace(config, log_path=str(folder / name)) for name, config in runs.items()]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    with mint.ServiceClient() as service:
        for config in configurations(folder):
            last = train(config, service).metrics()[-1]
            print(f"{config.log_path}: {last['test/env/all/reward/total']:.1%} of the held-out problems")


if __name__ == "__main__":
    main()
