"""From evidence to a report: every check on every window of a run, causes first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mint.errors import BadRequest
from mint.rl.doctor import (
    advantages,
    collapse,
    data,
    endings,
    grading,
    hacking,
    instability,
    mask,
    mismatch,
    movement,
    progress,
    sampling,
    saturation,
    scale,
    signal,
    staleness,
    text,
)
from mint.rl.doctor.evidence import Evidence, read_evidence
from mint.rl.doctor.finding import Finding, merged, ordered
from mint.rl.rundir import RunDir

CHECKS: tuple[Callable[[Evidence], list[Finding]], ...] = tuple(
    module.check
    for module in (
        signal, saturation, endings, grading, advantages, mask, text, data, mismatch, staleness, movement, instability,
        collapse, hacking, sampling, scale, progress,
    )
)  # fmt: skip
WINDOW, STRIDE = 40, 20
"""Steps looked at together: long enough to see a trend, short enough that what went wrong late is not averaged away."""


def examine(window: Evidence) -> list[Finding]:
    """What every check says of one window, in order of likelihood."""
    return ordered(merged(finding for check in CHECKS for finding in check(window))) if window.steps else []


def diagnose(run_dir: RunDir | str | Path) -> list[Finding]:
    """What is wrong with a run, likeliest cause first; nothing if nothing is."""
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    if run.config() is None:
        raise BadRequest(f"{run.path} is not a run directory: it has no config.json.")
    evidence = read_evidence(run)
    if not evidence.steps:
        return []
    first, last = evidence.span
    starts = range(first, max(last - WINDOW + 1, first) + STRIDE, STRIDE)
    found = [f for start in starts for f in examine(evidence.window(start, start + WINDOW - 1))]
    return ordered(merged(found))
