"""The same rollouts without training: measuring a policy on problems it is not trained on.

Also where the holdout comes from if the dataset has no test set, and the check that training stays off it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence

import mint
from mint.rl.completers import SamplingTokenCompleter
from mint.rl.datasets import ListRLDataset, holdout_split
from mint.rl.hashing import stable_hash
from mint.rl.metrics import RolloutErrorCounter, compute_trajectory_metrics
from mint.rl.rollout_limits import TerminationRewardPolicy
from mint.rl.rollouts import try_group_rollout
from mint.rl.rundir import RunDir, write_whole
from mint.rl.sampler import SampledGroup
from mint.rl.strategies import FailFast, RolloutStrategy
from mint.rl.types import EnvGroupBuilder, RLDataset, TrajectoryGroup, WrappedTrajectoryGroup

logger = logging.getLogger(__name__)


class RLTestSetEvaluator:
    """Every group of a dataset, sampled at temperature 1 with the same seeds each time, so that a change in the numbers
    is a change of the policy. Metrics are those of training, under `<name>/`."""

    def __init__(
        self,
        dataset: RLDataset,
        max_tokens: int,
        name: str = "test",
        num_groups_to_log: int = 4,
        strategy: RolloutStrategy | None = None,
        termination: TerminationRewardPolicy | None = None,
        seed: int = 0,
    ) -> None:
        self.builders_P: list[EnvGroupBuilder] = [
            builder for index in range(len(dataset)) for builder in dataset.get_batch(index)
        ]
        self.max_tokens = max_tokens
        self.name = name
        self.num_groups_to_log = num_groups_to_log
        self.strategy = strategy or FailFast()
        self.termination = termination
        self.seed = seed

    async def __call__(self, sampling_client: mint.SamplingClient) -> dict[str, float]:
        return (await self.evaluate(sampling_client))[0]

    async def evaluate(
        self, sampling_client: mint.SamplingClient, version: int = 0
    ) -> tuple[dict[str, float], list[SampledGroup]]:
        """Metrics, and the groups they were computed from."""
        sampled_P = await asyncio.gather(
            *(self._sample(sampling_client, version, number, builder) for number, builder in enumerate(self.builders_P))
        )
        wrapped_P = [sampled.wrapped for sampled in sampled_P if sampled.wrapped is not None]
        errors = RolloutErrorCounter()
        for sampled in sampled_P:
            errors.add(sampled.errors, group_skipped=sampled.wrapped is None)
        metrics = errors.get_metrics()
        if wrapped_P:
            groups_P = [wrapped.trajectory_group for wrapped in wrapped_P]
            metrics |= compute_trajectory_metrics(groups_P, [w.env_group_builder.logging_tags() for w in wrapped_P])
        return {f"{self.name}/{key}": value for key, value in metrics.items()}, list(sampled_P)

    async def _sample(
        self, sampling_client: mint.SamplingClient, version: int, number: int, builder: EnvGroupBuilder
    ) -> SampledGroup:
        seed = stable_hash(self.seed, self.name, number) >> 1
        policy = SamplingTokenCompleter(sampling_client, self.max_tokens, 1.0, seed=seed)
        outcome = await try_group_rollout(builder, policy, self.strategy, self.termination)
        if not isinstance(outcome, TrajectoryGroup):
            return SampledGroup(number, (0, number), None, outcome)
        return SampledGroup(
            number, (0, number), WrappedTrajectoryGroup(outcome, builder, version), outcome.rollout_errors
        )


# --------------------------------------------------------------------------------------------------------------------
# The holdout


MOST_HELD_OUT = 128
"""Problems a holdout made here has at most: enough for a standard error of 0.045, and bearable at every evaluation."""


class _Selection(RLDataset):
    """The batches of a dataset with some groups taken out, and without those left empty."""

    def __init__(self, dataset: RLDataset, held_out: set[str]) -> None:
        self.dataset = dataset
        self.held_out = held_out
        self.indices = [index for index in range(len(dataset)) if self._rest(index)]

    def _rest(self, index: int) -> list[EnvGroupBuilder]:
        return [b for b in self.dataset.get_batch(index) if b.problem_id() not in self.held_out]

    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return self._rest(self.indices[index])

    def __len__(self) -> int:
        return len(self.indices)


class _Batches(RLDataset):
    """Some batches of a dataset."""

    def __init__(self, dataset: RLDataset, indices: range) -> None:
        self.dataset = dataset
        self.indices = indices

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return self.dataset.get_batch(self.indices[index])

    def __len__(self) -> int:
        return len(self.indices)


def split_holdout(dataset: RLDataset, share: float) -> tuple[RLDataset, RLDataset | None]:
    """(train, holdout). By problem where all problems have names, wherever and however often they occur; else by batch,
    the last ones. At least one is held out, and at least one left; where that cannot be there is no holdout."""
    builders = [builder for index in range(len(dataset)) for builder in dataset.get_batch(index)]
    named = {name: builder for builder in builders if (name := builder.problem_id()) is not None}
    if all(builder.problem_id() is not None for builder in builders):
        _, held = holdout_split(sorted(named), share, key=str)
        held = sorted(held, key=stable_hash)[:MOST_HELD_OUT]
        if not held:
            return dataset, None
        logger.info("No test set: %d of %d problems are held out for evaluation.", len(held), len(named))
        return _Selection(dataset, set(held)), ListRLDataset([named[name] for name in held], len(held), seed=None)
    size = len(dataset)
    count = min(math.ceil(size * share), size - 1)
    if not count:
        return dataset, None
    logger.info("No test set: the last %d of %d training batches are held out for evaluation.", count, size)
    return _Batches(dataset, range(size - count)), _Batches(dataset, range(size - count, size))


class HoldoutGuard:
    """Notices training problems that are also evaluated on. Goes by the problem's name, or else by its prompt."""

    def __init__(self, run_dir: RunDir) -> None:
        self.file = run_dir.holdout_file
        self.held_out: set[int] = set(json.loads(self.file.read_text())) if self.file.is_file() else set()
        self.warned = False

    def hold_out(self, groups: Sequence[SampledGroup]) -> None:
        new = _keys(groups) - self.held_out
        if new:
            self.held_out |= new
            write_whole(self.file, json.dumps(sorted(self.held_out)) + "\n")

    def check(self, groups: Sequence[SampledGroup]) -> dict[str, float]:
        """`data/holdout_overlap`: the share of these groups' problems that are held out."""
        trained = _keys(groups)
        if not self.held_out or not trained:
            return {}
        overlap = len(trained & self.held_out) / len(trained)
        if overlap and not self.warned:
            logger.warning(
                "%.0f%% of this step's problems are in the test set too: its numbers will flatter the policy. Split "
                "the data by problem_id, or give the dataset builder a test set of its own.",
                100 * overlap,
            )
            self.warned = True
        return {"data/holdout_overlap": overlap}


def _keys(groups: Sequence[SampledGroup]) -> set[int]:
    keys = set()
    for sampled in groups:
        if sampled.wrapped is None:
            continue
        name = sampled.wrapped.env_group_builder.problem_id()
        if name is not None:
            keys.add(stable_hash("name", name))
            continue
        transitions = sampled.group.trajectories_G[0].transitions if sampled.group.trajectories_G else []
        if transitions:
            keys.add(stable_hash("prompt", transitions[0].ob.to_ints()))
    return keys
