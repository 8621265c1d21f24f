"""Datasets from lists of problems: shuffled by epoch, limited, cycled, split into train and holdout, interleaved.

`get_batch` is a pure function of the index and the seed, so resuming needs nothing but the number of the next batch.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from mint.errors import BadRequest
from mint.rl.hashing import stable_hash
from mint.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ListRLDataset(RLDataset):
    """The problems dealt out in batches, in a new order every epoch; batches run across the ends of epochs, so all are
    full (but for the last, when one epoch is all there is)."""

    def __init__(
        self,
        builders: Sequence[EnvGroupBuilder],
        groups_per_batch: int,
        *,
        seed: int | None = 0,
        limit: int | None = None,
        num_batches: int | None = None,
    ) -> None:
        """`seed=None` keeps the given order; `limit` takes only the first so many problems, to start small;
        `num_batches` cycles through them for as long as that takes, where None is once through."""
        self.builders = list(builders[:limit])
        if not self.builders or groups_per_batch < 1:
            raise BadRequest(
                f"a dataset of {len(self.builders)} problems in batches of {groups_per_batch}; both must be at least 1."
            )
        self.groups_per_batch = groups_per_batch
        self.seed = seed
        self.num_batches = num_batches
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.builders)))
        if self.seed is not None:
            random.Random(stable_hash(self.seed, epoch)).shuffle(order)
        return order

    def __len__(self) -> int:
        return self.num_batches or -(-len(self.builders) // self.groups_per_batch)

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        if not 0 <= index < len(self):
            raise BadRequest(f"batch {index} was asked for; there are {len(self)}, counted from 0.")
        start = index * self.groups_per_batch
        end = start + self.groups_per_batch
        if self.num_batches is None:
            end = min(end, len(self.builders))
        return [self._at(position) for position in range(start, end)]

    def _at(self, position: int) -> EnvGroupBuilder:
        epoch, place = divmod(position, len(self.builders))
        return self.builders[self._order(epoch)[place]]


# --------------------------------------------------------------------------------------------------------------------
# Holdout


def holdout_split(
    items: Sequence[T], fraction: float = 0.1, key: Callable[[T], object] = repr, seed: int = 0
) -> tuple[list[T], list[T]]:
    """(train, holdout) by a hash of the key: an item's side depends on nothing but itself and the seed, so equal items
    stay together and adding data moves none. Of two or more different items each side gets at least one."""
    if not 0 < fraction < 1:
        raise BadRequest(f"the holdout fraction is {fraction}; it must be between 0 and 1.")
    ranks = [stable_hash(seed, key(item)) for item in items]
    if len(set(ranks)) < 2:
        return list(items), []
    border = min(max(int(fraction * 2**32), min(ranks) + 1), max(ranks))
    train = [item for item, rank in zip(items, ranks, strict=True) if rank >= border]
    return train, [item for item, rank in zip(items, ranks, strict=True) if rank < border]


def overlap(train: Iterable[T], holdout: Iterable[T], key: Callable[[T], object] = repr) -> list[T]:
    """The holdout items that are in the training data too; there should be none."""
    seen = {key(item) for item in train}
    return [item for item in holdout if key(item) in seen]


def dataset_problem_ids(dataset: RLDataset) -> list[str]:
    """The names of all problems that have one, for `overlap`."""
    ids = (builder.problem_id() for i in range(len(dataset)) for builder in dataset.get_batch(i))
    return [problem_id for problem_id in ids if problem_id is not None]


# --------------------------------------------------------------------------------------------------------------------
# Several tasks in one batch


class InterleavedRLDataset(RLDataset):
    """Every place of every batch drawn from one of the sources by weight; each source in its own order, again from its
    start when it runs out."""

    def __init__(
        self,
        sources: Sequence[RLDataset],
        weights: Sequence[float],
        groups_per_batch: int,
        total_batches: int | None = None,
        seed: int = 0,
    ) -> None:
        if len(sources) != len(weights) or not sources or min(weights) <= 0:
            raise BadRequest(f"{len(sources)} sources have the weights {list(weights)}; each needs one above 0.")
        self.problems = [[b for i in range(len(source)) for b in source.get_batch(i)] for source in sources]
        self.groups_per_batch = groups_per_batch
        total = sum(map(len, self.problems)) // groups_per_batch if total_batches is None else total_batches
        if total < 1:
            raise BadRequest(f"the sources hold too few problems for one batch of {groups_per_batch} groups.")
        drawn = random.Random(seed).choices(range(len(sources)), weights, k=total * groups_per_batch)
        places = [0] * len(sources)
        self.schedule: list[tuple[int, int]] = []
        for source in drawn:
            self.schedule.append((source, places[source] % len(self.problems[source])))
            places[source] += 1

    def __len__(self) -> int:
        return len(self.schedule) // self.groups_per_batch

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        start = index * self.groups_per_batch
        return [self.problems[source][place] for source, place in self.schedule[start : start + self.groups_per_batch]]


@dataclass(frozen=True)
class InterleavedRLDatasetBuilder(RLDatasetBuilder):
    """Mixes training sets by weight; test sets follow one another, whole."""

    sources: list[RLDatasetBuilder]
    weights: list[float]
    groups_per_batch: int
    total_batches: int | None = None
    """None: as many as the sources' problems fill."""
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        built = [await source() for source in self.sources]
        train = InterleavedRLDataset(
            [train for train, _ in built], self.weights, self.groups_per_batch, self.total_batches, self.seed
        )
        tests = [test.get_batch(i) for _, test in built if test is not None for i in range(len(test))]
        problems = [builder for batch in tests for builder in batch]
        return train, ListRLDataset(problems, self.groups_per_batch, seed=None) if problems else None
