"""Going back when a run breaks down: to which checkpoint, and how it is written down so that a resumed run knows.

A rollback is a line in health.jsonl, dated before the checkpoint so that it survives the rewind, and a second line for
the checkpoint in checkpoints.jsonl, which makes it the last one. From there on the learning rate is halved, once for
every rollback: the same steps at the same rate would break down the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from mint.rl.doctor import Finding
from mint.rl.rundir import CheckpointRecord, RunDir, append_jsonl, read_jsonl

BREAKDOWN = frozenset({"reward_fell", "learning_rate_large", "same_answer", "collapse", "repetition"})
"""Findings that are about the policy and not about the task: training on cannot mend them, older weights can."""
MOST_ROLLBACKS = 3
JUDGED_STEPS = 3
"""A checkpoint is as good as the rewards of the step its policy sampled and of those just before."""
REWARD = "env/all/reward/total"

logger = logging.getLogger(__name__)


class BrokeDown(Exception):
    """Raised by the loop to be started again from `checkpoint`."""

    def __init__(self, finding: Finding, checkpoint: CheckpointRecord) -> None:
        super().__init__(f"{finding.kind}: going back to checkpoint {checkpoint.name}")
        self.finding = finding
        self.checkpoint = checkpoint


def rollbacks(run_dir: RunDir) -> int:
    return sum("rollback" in line for line in read_jsonl(run_dir.health_file))


def breakdown(run_dir: RunDir, findings: Sequence[Finding]) -> BrokeDown | None:
    """Whether to go back now, and where to: the checkpoint at which the reward was best, if it was better then than it
    is now."""
    grave = next((f for f in findings if f.kind in BREAKDOWN and f.severity == "alarm"), None)
    if grave is None:
        return None
    if rollbacks(run_dir) >= MOST_ROLLBACKS:
        logger.warning(
            "%s, but the run has gone back %d times already: it goes on as it is.", grave.kind, MOST_ROLLBACKS
        )
        return None
    rewards = {line["step"]: line[REWARD] for line in run_dir.metrics() if REWARD in line}

    def at(version: int) -> float:
        steps = range(version - JUDGED_STEPS + 1, version + 1)
        return float(np.mean([rewards[step] for step in steps if step in rewards])) if version in rewards else -np.inf

    best = max(run_dir.checkpoints(), key=lambda record: (at(record.batch), record.batch), default=None)
    if best is None or at(best.batch) <= at(max(rewards)):
        logger.warning("%s, but no checkpoint was better than the run is now: it goes on as it is.", grave.kind)
        return None
    return BrokeDown(grave, best)


def go_back(run_dir: RunDir, broke: BrokeDown) -> CheckpointRecord:
    record = broke.checkpoint
    line = {"step": record.batch - 1, "rollback": record.name, "because": broke.finding.to_json()}
    append_jsonl(run_dir.health_file, line)
    run_dir.append_checkpoint(record)
    return record
