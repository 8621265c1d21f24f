"""A set of whole numbers that mostly come in long runs, kept as the runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Intervals:
    def __init__(self, runs: Iterable[Iterable[int]] = ()) -> None:
        """`runs`: first and last number of each, ascending."""
        self.runs: list[list[int]] = [list(run) for run in runs]

    def __contains__(self, number: int) -> bool:
        at = self._run_before(number)
        return at >= 0 and number <= self.runs[at][1]

    def add(self, number: int) -> None:
        if number in self:
            return
        at = self._run_before(number)
        joins_before = at >= 0 and self.runs[at][1] == number - 1
        joins_after = at + 1 < len(self.runs) and self.runs[at + 1][0] == number + 1
        if joins_before and joins_after:
            self.runs[at : at + 2] = [[self.runs[at][0], self.runs[at + 1][1]]]
        elif joins_before:
            self.runs[at][1] = number
        elif joins_after:
            self.runs[at + 1][0] = number
        else:
            self.runs.insert(at + 1, [number, number])

    def _run_before(self, number: int) -> int:
        return bisect_right(self.runs, number, key=lambda run: run[0]) - 1
