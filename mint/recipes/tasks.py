"""What the recipes' datasets have in common: problems drawn by a seed, a tenth of them held out by their name."""

from __future__ import annotations

import random
import zlib
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mint.client.tokenizers import load_tokenizer
from mint.rl.datasets import ListRLDataset
from mint.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder

Problem = TypeVar("Problem")


def held_out(name: str) -> bool:
    """A tenth of all names, the same ones in every process."""
    return zlib.crc32(name.encode()) % 10 == 0


@dataclass(frozen=True)
class TaskBuilder(RLDatasetBuilder, Generic[Problem]):
    """Training problems and held-out ones. A task says how a problem is drawn, named and put to the model."""

    model_name: str = "mint/tiny"
    groups_per_batch: int = 16
    group_size: int = 8
    num_batches: int = 20
    tests: int = 100
    """Held-out problems to measure on."""
    seed: int = 0
    limit: int | None = None
    """Train on so many problems, again and again, to start small; None: on new ones in every batch."""

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem: ...

    @abstractmethod
    def name(self, problem: Problem) -> str:
        """Equal problems have equal names; a tenth of the names is held out."""

    @abstractmethod
    def group(self, problem: Problem, tokenizer: Any, size: int) -> EnvGroupBuilder: ...

    def draw_many(self, rng: random.Random, count: int, test: bool = False) -> list[Problem]:
        drawn: list[Problem] = []
        while len(drawn) < count:
            problem = self.draw(rng)
            if held_out(self.name(problem)) == test:
                drawn.append(problem)
        return drawn

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        tokenizer, rng = load_tokenizer(self.model_name), random.Random(self.seed)

        def groups(problems: list[Problem], size: int) -> list[EnvGroupBuilder]:
            return [self.group(problem, tokenizer, size) for problem in problems]

        drawn = groups(self.draw_many(rng, self.groups_per_batch * self.num_batches), self.group_size)
        train_set = ListRLDataset(
            drawn, self.groups_per_batch, seed=None, limit=self.limit, num_batches=self.num_batches
        )
        tests = groups(self.draw_many(rng, self.tests, test=True), 1)
        return train_set, ListRLDataset(tests, self.groups_per_batch, seed=None)
