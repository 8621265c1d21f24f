import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from mint.errors import BadRequest
from mint.rl.datasets import InterleavedRLDatasetBuilder, ListRLDataset, dataset_problem_ids, holdout_split, overlap
from mint.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder


@dataclass(frozen=True)
class Problem(EnvGroupBuilder):
    name: str

    async def make_envs(self) -> Sequence[Env]:
        return []

    def problem_id(self) -> str:
        return self.name


def problems(n: int, kind: str = "p") -> list[Problem]:
    return [Problem(f"{kind}{i}") for i in range(n)]


def names(dataset: RLDataset, batch: int) -> list[str | None]:
    return [builder.problem_id() for builder in dataset.get_batch(batch)]


def test_once_through_deals_every_problem_once() -> None:
    dataset = ListRLDataset(problems(10), 4)
    assert [len(dataset.get_batch(i)) for i in range(len(dataset))] == [4, 4, 2]
    assert sorted(dataset_problem_ids(dataset)) == sorted(p.name for p in problems(10))


def test_cycling_reshuffles_every_epoch_and_fills_every_batch() -> None:
    dataset = ListRLDataset(problems(10), 4, num_batches=10, seed=3)
    dealt = [name for i in range(10) for name in names(dataset, i)]
    epochs = [dealt[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(p.name for p in problems(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_depends_on_its_index_alone() -> None:
    forward, backward = ListRLDataset(problems(7), 3, num_batches=9), ListRLDataset(problems(7), 3, num_batches=9)
    assert [names(forward, i) for i in range(9)] == [names(backward, i) for i in reversed(range(9))][::-1]
    assert names(forward, 0) != names(ListRLDataset(problems(7), 3, seed=1, num_batches=9), 0)


def test_a_limit_starts_small_and_order_can_be_kept() -> None:
    dataset = ListRLDataset(problems(100), 2, limit=3, seed=None, num_batches=3)
    assert [names(dataset, i) for i in range(3)] == [["p0", "p1"], ["p2", "p0"], ["p1", "p2"]]


def test_bad_sizes_and_indices_are_refused() -> None:
    with pytest.raises(BadRequest, match="0 problems"):
        ListRLDataset([], 4)
    with pytest.raises(BadRequest, match="batch 3 was asked for; there are 3"):
        ListRLDataset(problems(10), 4).get_batch(3)


# ------------------------------------------------------------------------------------------------------- holdout


def test_a_split_is_about_the_asked_size_and_loses_nothing() -> None:
    items = [f"problem {i}" for i in range(2000)]
    train, held = holdout_split(items, 0.1)
    assert sorted(train + held) == sorted(items)
    assert 150 < len(held) < 250
    assert holdout_split(items, 0.1, seed=1)[1] != held


def test_an_items_side_depends_on_itself_alone() -> None:
    items = [f"problem {i}" for i in range(500)]
    held = set(holdout_split(items)[1])
    again = set(holdout_split([*reversed(items), *(f"new {i}" for i in range(500))])[1])
    assert held == {item for item in again if item.startswith("problem")}


def test_equal_items_stay_on_one_side() -> None:
    train, held = holdout_split([f"problem {i % 50}" for i in range(200)])
    assert overlap(train, held) == []
    assert len(held) % 4 == 0


@pytest.mark.parametrize("n", [2, 3, 5])
def test_small_sets_still_have_both_sides(n: int) -> None:
    for start in range(20):
        train, held = holdout_split([f"{start + i}" for i in range(n)], 0.05)
        assert train
        assert held
    assert holdout_split(["only"]) == (["only"], [])


def test_a_split_is_the_same_in_another_process() -> None:
    code = "from mint.rl.datasets import holdout_split; print(holdout_split([f'q{i}' for i in range(60)])[1])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(holdout_split([f"q{i}" for i in range(60)])[1])


def test_overlap_finds_what_is_on_both_sides() -> None:
    assert overlap(["a", "B "], ["b", "c"], key=lambda text: text.strip().lower()) == ["b"]


def test_a_fraction_of_everything_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"fraction is 1\.0"):
        holdout_split(["a", "b"], 1.0)


# ------------------------------------------------------------------------------------------------------- mixtures


@dataclass(frozen=True)
class Source(RLDatasetBuilder):
    kind: str
    size: int
    tests: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        test = ListRLDataset(problems(self.tests, f"{self.kind}test"), 2, seed=None) if self.tests else None
        return ListRLDataset(problems(self.size, self.kind), 3, seed=None), test


def test_sources_are_mixed_by_weight_each_in_its_own_order() -> None:
    mix = InterleavedRLDatasetBuilder([Source("a", 5), Source("b", 50)], [3.0, 1.0], 8, total_batches=100, seed=1)
    dataset, test = asyncio.run(mix())
    dealt = [str(name) for i in range(len(dataset)) for name in names(dataset, i)]
    assert len(dataset) == 100
    assert test is None
    share = Counter(name[0] for name in dealt)["a"] / len(dealt)
    assert 0.7 < share < 0.8
    assert [name for name in dealt if name[0] == "a"][:7] == ["a0", "a1", "a2", "a3", "a4", "a0", "a1"]
    again, _ = asyncio.run(mix())
    assert [names(again, i) for i in range(100)] == [names(dataset, i) for i in range(100)]


def test_without_a_length_the_sources_fill_the_batches() -> None:
    mix = InterleavedRLDatasetBuilder([Source("a", 5, tests=2), Source("b", 6, tests=1)], [1.0, 1.0], 4)
    dataset, test = asyncio.run(mix())
    assert len(dataset) == 2
    assert test is not None
    assert dataset_problem_ids(test) == ["atest0", "atest1", "btest0"]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0]])
def test_each_source_needs_a_weight(weights: list[float]) -> None:
    with pytest.raises(BadRequest, match="each needs one above 0"):
        asyncio.run(InterleavedRLDatasetBuilder([Source("a", 5), Source("b", 5)], weights, 2)())
