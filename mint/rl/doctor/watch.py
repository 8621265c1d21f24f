"""The doctor in the loop: a window of evidence in memory, a look every few steps, what is new to health.jsonl."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mint.rl.doctor.evidence import EVALUATION, Evaluation, Evidence, Step, read_evidence, samples_of
from mint.rl.doctor.finding import SEVERITIES, Finding
from mint.rl.doctor.report import WINDOW, examine
from mint.rl.rundir import Json, RolloutRecord, RunDir, append_jsonl, read_jsonl

logger = logging.getLogger(__name__)

KEPT_EVALUATIONS = 8
"""Beside the first, with which all are compared."""


class Watch:
    """Follows one run. A finding is told once, and again if it gets graver."""

    def __init__(self, run_dir: RunDir, config: Json, every: int) -> None:
        """Takes up what the run directory already holds. `every`: steps between looks; 0: never."""
        self.run_dir = run_dir
        self.config = config
        self.every = every
        before = read_evidence(run_dir, last=WINDOW) if every else Evidence(config, [])
        self.steps = list(before.steps)
        self.evaluations = list(before.evaluations)
        self.told: dict[str, int] = {}
        for line in read_jsonl(run_dir.health_file):
            if "kind" in line:
                self.told[line["kind"]] = SEVERITIES.index(line["severity"])

    def add_step(self, number: int, metrics: Mapping[str, float], records: Sequence[RolloutRecord]) -> None:
        if self.every:
            self.steps = [*self.steps, Step(number, dict(metrics), samples_of(records))][-WINDOW:]

    def add_evaluation(self, version: int, name: str, records: Sequence[RolloutRecord]) -> None:
        if self.every and name == EVALUATION:
            new = Evaluation(version, samples_of(records, keep=True))
            self.evaluations = [*self.evaluations[:1], *self.evaluations[1:][-KEPT_EVALUATIONS:], new]

    def look_if_due(self, step: int) -> list[Finding]:
        return self.look(step) if self.every and (step + 1) % self.every == 0 else []

    def look(self, step: int) -> list[Finding]:
        """What is new since the last look; it is written down under this step."""
        if not self.every or not self.steps:
            return []
        window = Evidence(self.config, self.steps, self.evaluations).window(self.steps[0].number, self.steps[-1].number)
        try:
            found = examine(window)
        except Exception:  # a border: a mistake of the doctor's must not end somebody's run
            logger.exception("The doctor failed at step %d; the run goes on.", step)
            return []
        new = [f for f in found if SEVERITIES.index(f.severity) > self.told.get(f.kind, -1)]
        for finding in new:
            self.told[finding.kind] = SEVERITIES.index(finding.severity)
            append_jsonl(self.run_dir.health_file, {"step": step} | finding.to_json())
        return new
