"""The rollouts of one step: an index of what each line says in short, and one line in full when it is looked at.

Token lists make up nearly all of a rollouts file, so the index is made without parsing them: a record's fields come in
the order of `RolloutRecord`, and everything before `prompt_tokens` is short.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mint.rl.rundir import RolloutRecord, RunDir, rollout_from_json

LISTS_BEGIN = b', "prompt_tokens": ['
"""Cannot stand inside a string, where its quotes would be escaped."""
MASK = re.compile(rb'"mask": \[([01, ]*)\]')
STEPS_KEPT = 24


@dataclass(frozen=True)
class Head:
    """A rollout without its tokens."""

    place: tuple[int, int]
    """Offset and length of its line."""
    group: int
    member: int
    reward: float
    advantage: float | None
    stop_reason: str | None
    tokens: int
    """Sampled ones."""
    prompt: str
    completion: str
    problem: str | None
    trained: bool
    policy_version: int
    temperature: float
    terms: dict[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    number: int
    members: tuple[Head, ...]
    """Best reward first."""

    @property
    def prompt(self) -> str:
        return self.members[0].prompt

    @property
    def problem(self) -> str | None:
        return self.members[0].problem

    @cached_property
    def rewards(self) -> list[float]:
        return [member.reward for member in self.members]

    @property
    def mean(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def spread(self) -> float:
        return max(self.rewards) - min(self.rewards)


@dataclass(frozen=True)
class StepIndex:
    file: Path
    groups: dict[int, Group]
    broken: int
    """Lines that could not be read."""

    @cached_property
    def members(self) -> list[Head]:
        return [member for group in self.groups.values() for member in group.members]

    def record(self, head: Head) -> RolloutRecord:
        with open(self.file, "rb") as file:
            file.seek(head.place[0])
            return rollout_from_json(json.loads(file.read(head.place[1])))


class Rollouts:
    """The rollout files of a run; the indexes of the last few steps looked at are kept."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._kept: OrderedDict[Path, tuple[tuple[int, int], StepIndex]] = OrderedDict()

    def steps(self, evaluator: str | None = None) -> list[int]:
        return self.run_dir.rollout_steps(evaluator)

    def evaluators(self) -> list[str]:
        found = {file.stem.rpartition("_")[0] for file in self.run_dir.rollouts_folder.glob("eval_*_*.jsonl")}
        return sorted(name.removeprefix("eval_") for name in found)

    def step(self, number: int, evaluator: str | None = None) -> StepIndex | None:
        """None where nothing was written for it."""
        file = self.run_dir.rollouts_file(number, evaluator)
        try:
            found = file.stat()
        except OSError:
            return None
        version = (found.st_mtime_ns, found.st_size)
        kept = self._kept.get(file)
        if kept is None or kept[0] != version:
            self._kept[file] = kept = (version, read_index(file))
        self._kept.move_to_end(file)
        while len(self._kept) > STEPS_KEPT:
            self._kept.popitem(last=False)
        return kept[1]


def read_index(file: Path) -> StepIndex:
    members: dict[int, list[Head]] = defaultdict(list)
    offset = broken = 0
    with open(file, "rb") as lines:
        for line in lines:
            try:
                head = head_of(line, offset)
                members[head.group].append(head)
            except (ValueError, KeyError, TypeError):
                broken += 1
            offset += len(line)
    groups = {
        number: Group(number, tuple(sorted(some, key=lambda head: (-head.reward, head.member))))
        for number, some in sorted(members.items())
    }
    return StepIndex(file, groups, broken)


def head_of(line: bytes, offset: int) -> Head:
    cut = line.find(LISTS_BEGIN)
    short: dict[str, Any] = json.loads(line if cut < 0 else line[:cut] + b"}")
    found = MASK.search(line, max(cut, 0))
    return Head(
        place=(offset, len(line)),
        group=short["group"],
        member=short["member"],
        reward=float(short["reward"]),
        advantage=short.get("advantage"),
        stop_reason=short.get("stop_reason"),
        tokens=found.group(1).count(b"1") if found else 0,
        prompt=short.get("prompt_text", ""),
        completion=short.get("completion_text", ""),
        problem=short.get("problem"),
        trained=bool(short.get("trained")),
        policy_version=short.get("policy_version", 0),
        temperature=short.get("temperature", 1.0),
        terms=short.get("reward_terms", {}),
        tags=tuple(short.get("tags", ())),
    )
