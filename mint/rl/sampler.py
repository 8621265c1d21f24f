"""Which groups a step trains on, and which policy samples them.

Step s trains on batch s. Policy version v is the weights after v steps. Batch s is sampled by version max(0, s - lag):
as soon as version v exists, batch v + lag is begun with it, and never earlier. So no group is ever older than `lag`,
none is thrown away, and up to lag + 1 batches are in the making while the trainer works. The schedule is fixed rather
than raced: who samples what does not depend on how long anything took, which is what makes a run repeatable and
resumable (`mint.rl.resume`).

Every rollout draws from a random stream of its own, named by (run seed, step, number of the group in the step, member).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import mint
from mint.errors import BadRequest
from mint.rl.completers import SamplingTokenCompleter
from mint.rl.config import Config
from mint.rl.data_processing import has_signal, penalize_overlong
from mint.rl.hashing import stable_hash
from mint.rl.rollouts import try_group_rollout
from mint.rl.schedules import as_schedule
from mint.rl.strategies import as_strategy
from mint.rl.types import EnvGroupBuilder, RLDataset, RolloutError, TrajectoryGroup, WrappedTrajectoryGroup

T = TypeVar("T")
Position = tuple[int, int]
"""A place in the data: (batch of the dataset, group in that batch). Batches beyond the last start over."""


@dataclass(frozen=True)
class SampledGroup:
    """One group as it came back, or what became of it."""

    number: int
    """In its step, counting every group begun."""
    place: Position
    wrapped: WrappedTrajectoryGroup | None
    """None: it failed, and the strategy does without."""
    errors: list[RolloutError] = field(default_factory=list)
    replaced: bool = False
    """Dynamic sampling put another group in its place; it counts in the metrics only."""

    @property
    def group(self) -> TrajectoryGroup:
        assert self.wrapped is not None
        return self.wrapped.trajectory_group


@dataclass
class StepBatch:
    """The groups of one step, most of them still to come."""

    step: int
    policy_version: int
    temperature: float
    parts: list[asyncio.Task[list[SampledGroup]]]
    """In order; the groups of each are ready together."""
    end: Position | None
    """Where the data goes on after this batch; None until dynamic sampling has found out."""

    async def groups(self) -> list[SampledGroup]:
        return [group for part in await asyncio.gather(*self.parts) for group in part]


def take(
    dataset: RLDataset, start: Position, count: int | None
) -> tuple[list[tuple[Position, EnvGroupBuilder]], Position]:
    """`count` groups from `start` on, across batches; None: what is left of the batch at `start`."""
    taken: list[tuple[Position, EnvGroupBuilder]] = []
    batch, offset = start
    while True:
        builders = dataset.get_batch(batch % len(dataset))
        end = len(builders) if count is None else min(len(builders), offset + count - len(taken))
        taken += [((batch, i), builders[i]) for i in range(offset, end)]
        batch, offset = (batch + 1, 0) if end == len(builders) else (batch, end)
        if len(taken) == count or (count is None and taken):
            return taken, (batch, offset)
        if not taken and batch > start[0] + len(dataset):
            raise BadRequest(f"the dataset has {len(dataset)} batches, and all of them are empty.")


class BatchSampler:
    """Begins each batch when its policy is there and hands it out when its step comes."""

    def __init__(
        self,
        config: Config,
        dataset: RLDataset,
        num_steps: int,
        first_step: int = 0,
        position: Position = (0, 0),
        pending: Iterable[StepBatch] = (),
    ) -> None:
        self.config = config
        self.dataset = dataset
        self.num_steps = num_steps
        self.strategy = as_strategy(config.rollout_error_tolerance)
        self.temperature = as_schedule(config.temperature)
        self.position = position
        self.batches = {batch.step: batch for batch in pending}
        self.next_step = first_step + len(self.batches)
        self.last: StepBatch | None = None

    def advance(self, version: int, client: mint.SamplingClient) -> None:
        """`client` holds policy `version`: begins every batch that waited for it."""
        while self.next_step <= min(version + self.config.lag, self.num_steps - 1):
            self.last = self.batches[self.next_step] = self._begin(self.next_step, version, client)
            self.next_step += 1

    def batch(self, step: int) -> StepBatch:
        return self.batches[step]

    async def ahead(self, version: int) -> tuple[list[StepBatch], Position]:
        """The batches that older policies sampled for steps from `version` on, complete, and where the data goes on
        after them: with the weights of `version`, all that is needed to continue from there."""
        batches = [b for step, b in sorted(self.batches.items()) if step >= version and b.policy_version < version]
        for batch in batches:
            await batch.groups()
        return batches, self._after(self.batches.get(version + len(batches) - 1))

    def forget(self, version: int) -> None:
        """Lets go of what is not needed once policy `version` exists; its last batch still says where the data is."""
        self.batches = {step: batch for step, batch in self.batches.items() if step >= version - 1}

    async def close(self) -> None:
        parts = [part for batch in self.batches.values() for part in batch.parts]
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)

    # ----------------------------------------------------------------------------------------------------------------

    def _begin(self, step: int, version: int, client: mint.SamplingClient) -> StepBatch:
        batch = StepBatch(step, version, self.temperature(step, self.num_steps), [], None)
        if self.config.dynamic_sampling:
            batch.parts = [asyncio.create_task(self._fill(batch, client, self.last))]
        else:
            taken, batch.end = take(self.dataset, self._after(self.last), self.config.groups_per_batch)
            batch.parts = [
                asyncio.create_task(self._sample(batch, client, number, place, builder))
                for number, (place, builder) in enumerate(taken)
            ]
        return batch

    def _after(self, batch: StepBatch | None) -> Position:
        """Where the data goes on after a complete batch; None: where this sampler began."""
        if batch is None:
            return self.position
        assert batch.end is not None
        return batch.end

    async def _fill(
        self, batch: StepBatch, client: mint.SamplingClient, before: StepBatch | None
    ) -> list[SampledGroup]:
        """Rounds of sampling until as many groups have signal as the batch holds, or the rounds are used up."""
        if before is not None:
            await before.groups()  # how far it read the data decides where this one starts
        position = self._after(before)
        sampled: list[SampledGroup] = []
        wanted, missing = 0, self.config.groups_per_batch
        for _ in range(1 + self.config.dynamic_sampling):
            taken, position = take(self.dataset, position, missing)
            wanted = wanted or len(taken)
            new = await _all(
                self._sample(batch, client, number, place, builder)
                for number, (place, builder) in enumerate(taken, len(sampled))
            )
            sampled += [group for groups in new for group in groups]
            missing = wanted - sum(group.wrapped is not None and has_signal(group.group) for group in sampled)
            if missing == 0:
                break
        batch.end = position
        return [_without_signal_replaced(group) for group in sampled]

    async def _sample(
        self, batch: StepBatch, client: mint.SamplingClient, number: int, place: Position, builder: EnvGroupBuilder
    ) -> list[SampledGroup]:
        config = self.config
        seed = stable_hash(config.seed, "train", batch.step, number) >> 1
        policy = SamplingTokenCompleter(client, config.max_tokens, batch.temperature, seed=seed)
        began = time.monotonic()
        outcome = await try_group_rollout(builder, policy, self.strategy, config.termination)
        if not isinstance(outcome, TrajectoryGroup):
            return [SampledGroup(number, place, None, outcome)]
        if config.overlong_buffer:
            outcome = penalize_overlong(outcome, config.max_tokens, config.overlong_buffer, config.overlong_penalty)
        wrapped = WrappedTrajectoryGroup(outcome, builder, batch.policy_version, time.monotonic() - began)
        return [SampledGroup(number, place, wrapped, outcome.rollout_errors)]


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; if one fails, the others are stopped."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _without_signal_replaced(sampled: SampledGroup) -> SampledGroup:
    if sampled.wrapped is None or has_signal(sampled.group):
        return sampled
    return replace(sampled, replaced=True)


def finished_batch(
    step: int, policy_version: int, temperature: float, groups: Sequence[SampledGroup], end: Position | None
) -> StepBatch:
    """A batch that needs no sampling, as read back from a checkpoint; one part a group, so that it streams the same."""

    async def ready(group: SampledGroup) -> list[SampledGroup]:
        return [group]

    return StepBatch(step, policy_version, temperature, [asyncio.create_task(ready(group)) for group in groups], end)
