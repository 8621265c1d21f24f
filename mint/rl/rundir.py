"""The run directory: what is written where, and how it is read back.

It is the truth about a run and an API: resume, dashboard, doctor, bisect and plots read it and nothing else.

    config.json                         the resolved configuration, one key a field of `rl.train.Config`, and the
                                        file the dataset builder came from
    metrics.jsonl                       one object a step: `step` and every metric (names: `rl.metrics`)
    checkpoints.jsonl                   one `CheckpointRecord` a line, written once the server has acknowledged the save
    rollouts/step_NNNNNN.jsonl          one `RolloutRecord` a line, what step N trained on
    rollouts/eval_<name>_NNNNNN.jsonl   the same for the evaluation of policy version N
    pending/NNNNNN.jsonl                groups sampled before checkpoint N and not yet trained on (see `rl.resume`)
    holdout.json                        digests of the held-out prompts, for the overlap check
    ledger.jsonl, health.jsonl          per-prompt pass rates; what the doctor said (written by those modules)
    timing_spans.jsonl, trace_events.jsonl   where the time went; the second opens in Perfetto
    logs.log, code.diff                 the text log; commit and uncommitted changes of the code that ran

A process may die in the middle of a line, so readers ignore a torn last line and writers cut it off before they append.
Numbers that are not finite are written as JSON's usual extension (`NaN`, `Infinity`), which Python reads back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mint.errors import BadRequest

Json = dict[str, Any]

REWARD = ("env/all/reward/total", "reward/mean", "reward")
HOLDOUT = ("test/env/all/reward/total", "test/reward", "holdout/reward")
"""Names of one metric, the library's own first; loops written by hand use the others."""
_Record = TypeVar("_Record", bound="CheckpointRecord | RolloutRecord")


@dataclass(frozen=True)
class CheckpointRecord:
    """A line of checkpoints.jsonl. Fields that a newer version added are kept out of an older reader's way."""

    name: str
    batch: int
    """Steps trained so far, which is also the version of the saved policy."""
    state_path: str
    """Weights with optimizer state, for training on."""
    sampler_path: str | None = None
    """Weights for sampling; None for a rolling checkpoint, which exists only to resume from."""
    epoch: int = 0
    final: bool = False
    rolling: bool = False
    position: tuple[int, int] = (0, 0)
    """Where the first batch that is not in `pending` starts in the data: (batch of the dataset, group in it)."""
    pending: str | None = None
    """File with the groups already sampled for the next steps, relative to the run directory."""
    renderer_name: str | None = None
    """How prompts were made, for whoever samples from these weights."""


@dataclass(frozen=True)
class TurnRecord:
    """One turn of a rollout: its action is `completion_tokens[start:end]`, what the environment said stands before."""

    start: int
    end: int
    reward: float = 0.0
    restarts: bool = False
    """The observation did not continue the conversation so far; all of it stands before `start`."""
    metrics: dict[str, float] = field(default_factory=dict)
    logs: Json = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutRecord:
    """A line of a rollouts file: one member of one group, token by token.

    All per-token lists are as long as `completion_tokens`, which holds everything after the first prompt: what the
    policy sampled (mask 1) and what the environment put in between (mask 0, and 0 in the other lists).
    """

    step: int
    group: int
    member: int
    policy_version: int
    """Number of training steps the policy that sampled this had seen."""
    temperature: float
    reward: float
    """Total: the turns' rewards and the final one."""
    final_reward: float = 0.0
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Every metric the environment and the group gave for this member."""
    advantage: float | None = None
    """None in an evaluation, or where it is not known."""
    trained: bool = False
    """Whether its tokens went to the trainer; not if filtered out, masked or without an advantage."""
    stop_reason: str | None = None
    tags: list[str] = field(default_factory=list)
    problem: str | None = None
    """The problem's lasting name, if it has one."""
    prompt_text: str = ""
    prompt_oddity: str | None = None
    """What in the prompt's tokens does not fit the model's tokenizer: see `mint.rl.prompt_check`."""
    completion_text: str = ""
    prompt_tokens: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    completion_pieces: list[str] = field(default_factory=list)
    """The text of each completion token alone."""
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the sampler."""
    train_logprobs: list[float] | None = None
    """Of the trainer, before the update; None if not trained."""
    reference_logprobs: list[float] | None = None
    """Of the KL reference; None without a KL term, or if not trained."""
    advantages: list[float] | None = None
    """As sent, the KL penalty and the aggregation included; None if not trained."""
    turns: list[TurnRecord] = field(default_factory=list)


class RunDir:
    """Paths, writers and readers of one run directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints_file = self.path / "checkpoints.jsonl"
        self.health_file = self.path / "health.jsonl"
        self.ledger_file = self.path / "ledger.jsonl"
        self.holdout_file = self.path / "holdout.json"
        self.spans_file = self.path / "timing_spans.jsonl"
        self.trace_file = self.path / "trace_events.jsonl"
        self.log_file = self.path / "logs.log"
        self.diff_file = self.path / "code.diff"
        self.rollouts_folder = self.path / "rollouts"
        self.pending_folder = self.path / "pending"

    # ------------------------------------------------------------------------------------------------ config, metrics

    def write_config(self, config: Json) -> None:
        write_whole(self.config_file, json.dumps(config, indent=2, default=plain) + "\n")

    def config(self) -> Json | None:
        """None where no run was ever started."""
        return json.loads(self.config_file.read_text()) if self.config_file.is_file() else None

    def append_metrics(self, step: int, metrics: Json) -> None:
        append_jsonl(self.metrics_file, {"step": step, **metrics})

    def metrics(self) -> list[Json]:
        return read_jsonl(self.metrics_file)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def append_checkpoint(self, record: CheckpointRecord) -> None:
        append_jsonl(self.checkpoints_file, asdict(record), sync=True)

    def checkpoints(self) -> list[CheckpointRecord]:
        return [_from_json(CheckpointRecord, line) for line in read_jsonl(self.checkpoints_file)]

    def last_checkpoint(self) -> CheckpointRecord | None:
        return next(reversed(self.checkpoints()), None)

    def pending_file(self, batch: int) -> Path:
        return self.pending_folder / f"{batch:06d}.jsonl"

    # ------------------------------------------------------------------------------------------------ rollouts

    def rollouts_file(self, step: int, evaluator: str | None = None) -> Path:
        prefix = "step" if evaluator is None else f"eval_{file_name(evaluator)}"
        return self.rollouts_folder / f"{prefix}_{step:06d}.jsonl"

    def write_rollouts(self, step: int, records: Iterable[RolloutRecord], evaluator: str | None = None) -> None:
        write_jsonl(self.rollouts_file(step, evaluator), map(_rollout_to_json, records))

    def rollouts(self, step: int, evaluator: str | None = None) -> list[RolloutRecord]:
        return [rollout_from_json(line) for line in read_jsonl(self.rollouts_file(step, evaluator))]

    def rollout_steps(self, evaluator: str | None = None) -> list[int]:
        pattern = self.rollouts_file(0, evaluator).name.replace("000000", "*")
        return sorted(int(file.stem.rpartition("_")[2]) for file in self.rollouts_folder.glob(pattern))

    # ------------------------------------------------------------------------------------------------ going back

    def rewind(self, step: int) -> None:
        """Forgets everything about `step` and after it, so that those steps can be done again."""
        for file in (self.metrics_file, self.ledger_file, self.health_file, self.spans_file):
            if file.is_file():
                write_jsonl(file, [line for line in read_jsonl(file) if line.get("step", -1) < step])
        for file in self.rollouts_folder.glob("*_*.jsonl"):
            if int(file.stem.rpartition("_")[2]) >= step:
                file.unlink()
        for file in self.pending_folder.glob("*.jsonl"):
            if int(file.stem) > step:
                file.unlink()

    def clear(self) -> None:
        """Empties the directory."""
        shutil.rmtree(self.path, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------------
# Lines of JSON


def append_jsonl(path: Path, record: Json, sync: bool = False) -> None:
    """Adds a line, first cutting off a torn one. `sync` waits until the disk has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        _cut_torn_line(file)
        file.write(json.dumps(record, default=plain).encode() + b"\n")
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _cut_torn_line(file: Any) -> None:
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def read_jsonl(path: Path) -> list[Json]:
    """Every whole line; nothing where there is no file. A broken line that is not the last one is an error."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is empty or torn
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise BadRequest(f"{path}, line {number}, is not JSON ({error}); mend or remove the line.") from error
    return records


def write_jsonl(path: Path, records: Iterable[Json]) -> None:
    """The whole file at once: a reader sees the old one or the new one, never a part."""
    write_whole(path, "".join(json.dumps(record, default=plain) + "\n" for record in records))


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with open(part, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def plain(value: Any) -> Any:
    """numpy scalars and arrays as JSON; anything else by its text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value)


def file_name(text: str) -> str:
    """`text` as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-.") or "unnamed"


def _rollout_to_json(record: RolloutRecord) -> Json:
    """`asdict` without its copy of every list, which for long rollouts takes longer than writing them."""
    return vars(record) | {"turns": [vars(turn) for turn in record.turns]}


def rollout_from_json(line: Json) -> RolloutRecord:
    return _from_json(RolloutRecord, line | {"turns": [TurnRecord(**turn) for turn in line["turns"]]})


def _from_json(record: type[_Record], line: Json) -> _Record:
    known = {f.name for f in fields(record)}
    values = {name: value for name, value in line.items() if name in known}
    if "position" in values:
        values["position"] = tuple(values["position"])
    return record(**values)
