"""Problems that are just hard enough: a dataset that chooses each batch by what the ledger knows.

A group teaches when its members differ, which is likeliest for problems that succeed about half the time. A batch is,
in this order:
- re-tests, at most an eighth: problems outside the band whose time has come (after 4, 8, 16 ... batches, doubling with
  every visit outside the band, since policies improve and forget);
- new problems and problems inside the band, half each, as long as there are both;
- if that does not fill it, the problems outside the band that are nearest to it.
Within each, those chosen longest ago come first, so the band is worked through rather than drawn at random. No problem
is in a batch twice, unless there are fewer problems than places.

The choice is a function of the ledger, and is written into it before it is used: a resumed run has the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from mint.errors import BadRequest
from mint.rl.ledger import Ledger
from mint.rl.types import EnvGroupBuilder, RLDataset

RETEST_SHARE = 8
"""One in so many places of a batch may go to a re-test."""
RETEST_AFTER = 4
"""Batches until the first one."""
MOST_DOUBLINGS = 5


class BandDataset(RLDataset):
    """The problems of `dataset`, in batches of its sizes, chosen when they are first asked for."""

    def __init__(
        self,
        dataset: RLDataset,
        ledger: Ledger,
        band: tuple[float, float],
        num_steps: int,
        groups_per_batch: int | None = None,
    ) -> None:
        """Long enough for `num_steps` never to come to a batch twice, since a choice once made stays.
        `groups_per_batch`: of a step, where that is not a batch of the dataset."""
        self.sizes = [len(dataset.get_batch(i)) for i in range(len(dataset))]
        self.problems: dict[str, EnvGroupBuilder] = {}
        for index in range(len(dataset)):
            for builder in dataset.get_batch(index):
                name = builder.problem_id()
                if name is None:
                    raise BadRequest(
                        f"difficulty_band goes by the names of problems, and {type(builder).__name__}.problem_id() "
                        "gives None; give them names that last."
                    )
                self.problems.setdefault(name, builder)
        self.ledger = ledger
        self.low, self.high = band
        groups = None if groups_per_batch is None else num_steps * groups_per_batch
        self.num_batches = 1 + (num_steps if groups is None else -(-groups // max(min(self.sizes), 1)))

    def __len__(self) -> int:
        return self.num_batches

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        if index not in self.ledger.choices:
            self.ledger.record_choice(index, self._choose(index, self.sizes[index % len(self.sizes)]))
        return [self.problems[name] for name in self.ledger.choices[index]]

    # ----------------------------------------------------------------------------------------------------------------

    def _choose(self, index: int, size: int) -> list[str]:
        last = {name: batch for batch, names in sorted(self.ledger.choices.items()) for name in names}
        in_turn = sorted(self.problems, key=lambda name: last.get(name, -1))
        new = [name for name in in_turn if name not in last]
        inside = [name for name in in_turn if name in last and not self._distance(name)]
        outside = [name for name in in_turn if name in last and self._distance(name)]
        due = [name for name in outside if index - last[name] >= self._patience(name)]

        chosen = due[: max(size // RETEST_SHARE, 1)]
        free = size - len(chosen)
        from_new = min(len(new), max(free // 2, free - len(inside)))
        chosen += new[:from_new] + inside[: free - from_new]
        nearest = sorted(set(outside) - set(chosen), key=lambda name: (self._distance(name), last[name], name))
        chosen += nearest[: size - len(chosen)]
        return [chosen[place % len(chosen)] for place in range(size)]

    def _distance(self, name: str) -> float:
        """How far outside the band, 0 within."""
        rate = self.ledger.rate(name)
        return max(self.low - rate, rate - self.high, 0.0)

    def _patience(self, name: str) -> int:
        """Batches a problem outside the band waits for its next visit."""
        visits_outside = 0
        for visit in reversed(self.ledger.visits.get(name, [])):
            if self.low <= visit.rate <= self.high:
                break
            visits_outside += 1
        return RETEST_AFTER * 2 ** min(max(visits_outside - 1, 0), MOST_DOUBLINGS)
