"""The ledger: every problem's pass rate over time, and what it says about the problem.

One line a step in ledger.jsonl, so it is rewound with the run and read back exactly. Which problems come next is
`mint.rl.band`'s business; groups and rewards come from the loop.

A problem's rate is the mean reward of its group, held to 0..1: for right-or-wrong rewards the share of right answers.
Judged are its latest groups that together have `EVIDENCE` rollouts:

    solved     all of them without signal and right (rate from `GOOD_REWARD` up)
    dead       all of them without signal and wrong
    learning   anything else, and any problem with fewer rollouts than that

Eight rollouts, since eight equal ones in a row come from a problem with a pass rate inside 0.31..0.69 less than one
time in twenty (0.69 ** 8 = 0.05). The mistake is cheap: a problem set aside is tried again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from mint.rl.data_processing import has_signal
from mint.rl.hashing import stable_hash
from mint.rl.metrics import GOOD_REWARD
from mint.rl.rundir import Json, RunDir, append_jsonl, read_jsonl
from mint.rl.sampler import SampledGroup

EVIDENCE = 8
"""Rollouts that a judgement needs."""

State = Literal["solved", "learning", "dead"]
STATES: tuple[State, ...] = ("solved", "learning", "dead")


@dataclass(frozen=True)
class Visit:
    """One group of one problem."""

    step: int
    rate: float
    of: int
    """Members of the group."""
    signal: bool


class Ledger:
    """All visits so far, and the choices of the band sampler, which are replayed rather than made again on resume."""

    def __init__(self, run_dir: RunDir, version: int = 0, lines: Iterable[Json] | None = None) -> None:
        """Reads what the run directory holds, or takes these lines instead. `version`: steps trained so far."""
        self.run_dir = run_dir
        self.version = version
        self.visits: dict[str, list[Visit]] = {}
        self.choices: dict[int, list[str]] = {}
        """By batch, the problems the band sampler put in it."""
        for line in read_jsonl(run_dir.ledger_file) if lines is None else lines:
            self.take(line)

    def record(self, step: int, groups: Sequence[SampledGroup]) -> dict[str, float]:
        """Adds a step's groups; returns how many problems are in which state."""
        seen = [(name_of(sampled), sampled) for sampled in groups if sampled.wrapped is not None]
        line: Json = {"step": step, "groups": [{"problem": name} | _measured(sampled) for name, sampled in seen]}
        append_jsonl(self.run_dir.ledger_file, line)
        self.take(line)
        self.version = step + 1
        counts = self.counts()
        return {f"ledger/{state}": float(counts[state]) for state in STATES}

    def record_choice(self, batch: int, problems: list[str]) -> None:
        """The line carries the version of the policy that will sample the batch: a run that goes back before that
        policy chooses again, one that goes back to a later one has the groups and needs their names."""
        append_jsonl(self.run_dir.ledger_file, {"step": self.version, "batch": batch, "choice": problems})
        self.choices[batch] = problems

    def state(self, problem: str) -> State:
        recent = self._recent(problem)
        if sum(visit.of for visit in recent) < EVIDENCE or any(visit.signal for visit in recent):
            return "learning"
        good = [visit.rate >= GOOD_REWARD for visit in recent]
        return "solved" if all(good) else "learning" if any(good) else "dead"

    def rate(self, problem: str) -> float:
        """The recent pass rate. With fewer than `EVIDENCE` rollouts two imagined ones, one right and one wrong, draw it
        towards a half, which is also the rate of a problem never seen."""
        recent = self._recent(problem)
        rollouts = sum(visit.of for visit in recent)
        imagined = 2 if rollouts < EVIDENCE else 0
        return (sum(visit.rate * visit.of for visit in recent) + imagined / 2) / (rollouts + imagined)

    def counts(self) -> Counter[State]:
        return Counter(self.state(problem) for problem in self.visits)

    def measured_rates(self) -> tuple[list[float], list[int]]:
        """The recent pass rate of every problem seen, as measured, and the rollouts it was measured with."""
        recent_P = [self._recent(problem) for problem in self.visits]
        rollouts_P = [sum(visit.of for visit in recent) for recent in recent_P]
        rates_P = [
            sum(visit.rate * visit.of for visit in recent) / rollouts
            for recent, rollouts in zip(recent_P, rollouts_P, strict=True)
        ]
        return rates_P, rollouts_P

    def take(self, line: Json) -> None:
        """One line of ledger.jsonl."""
        if "choice" in line:
            self.choices[line["batch"]] = line["choice"]
            return
        for group in line["groups"]:
            visit = Visit(line["step"], group["rate"], group["of"], group["signal"])
            if visit.of:
                self.visits.setdefault(group["problem"], []).append(visit)

    # ----------------------------------------------------------------------------------------------------------------

    def _recent(self, problem: str) -> list[Visit]:
        """The latest visits, as few as have `EVIDENCE` rollouts."""
        recent: list[Visit] = []
        for visit in reversed(self.visits.get(problem, [])):
            if sum(v.of for v in recent) >= EVIDENCE:
                break
            recent.append(visit)
        return recent


def name_of(sampled: SampledGroup) -> str:
    """The problem's own name, else one made from its prompt."""
    assert sampled.wrapped is not None
    name = sampled.wrapped.env_group_builder.problem_id()
    if name is not None:
        return name
    prompts = [t.transitions[0].ob.to_ints() for t in sampled.group.trajectories_G if t.transitions]
    return f"{stable_hash(prompts[0] if prompts else None):08x}"


def _measured(sampled: SampledGroup) -> Json:
    rewards_G = sampled.group.get_total_rewards()
    rate = float(np.clip(rewards_G, 0, 1).mean()) if rewards_G else 0.0
    visit = Visit(0, rate, len(rewards_G), has_signal(sampled.group))
    return {name: value for name, value in asdict(visit).items() if name != "step"}
