"""What a run will take, before it is begun: tokens, seconds, memory, from a pilot of a few steps of the same run.

The pilot is the loop itself in a directory that is thrown away, so everything that costs anything is in it. What it
cannot know: answers that grow or shrink as the policy learns, and what else the server will be doing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import mint
from mint.errors import BadRequest
from mint.rl.config import Config
from mint.rl.setup import build_datasets
from mint.rl.train import main

PILOT_STEPS = 4
"""The first is left out: it warms up caches, and its evaluation overlaps with its sampling."""


@dataclass(frozen=True)
class Preview:
    steps: int
    evaluations: int
    sampled_tokens: int
    """In training and evaluation together."""
    prompt_tokens: int
    trained_tokens: int
    seconds: float
    memory_bytes: int | None
    """Resident in this process and those it started, the local server among them; None on other systems. Whatever a
    remote server or a GPU holds is not in it."""
    enough_for: int | None = None
    """Steps that the budget of the configuration is enough for; None where it is enough for all of them."""

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / 2**20:,.0f} MiB on this machine"
        budget = "" if self.enough_for is None else f" The budget is enough for about {self.enough_for} of the steps."
        return (
            f"{self.steps} steps and {self.evaluations} evaluations: about {self.sampled_tokens:,} sampled, "
            f"{self.prompt_tokens:,} prompt and {self.trained_tokens:,} trained tokens, {self.seconds:,.0f} s{memory}."
            f"{budget}"
        )


async def preview(config: Config, service: mint.ServiceClient) -> Preview:
    """Runs `PILOT_STEPS` of the run and extrapolates. The run itself is left untouched."""
    dataset, test_set = await build_datasets(config)
    steps = config.max_steps or len(dataset)
    if steps <= PILOT_STEPS:
        raise BadRequest(f"the run has {steps} steps, no more than a preview takes ({PILOT_STEPS}); just run it.")
    with tempfile.TemporaryDirectory(prefix="mint-preview-") as folder:
        pilot = replace(
            config,
            log_path=str(Path(folder) / "pilot"),
            max_steps=PILOT_STEPS,
            eval_every=PILOT_STEPS + 1 if config.eval_every else 0,  # before the first step and at the end
            save_every=0,
            loggers=(),
            rollback=False,
            budget_tokens=None,
            budget_seconds=None,
        )
        lines = (await main(pilot, service)).metrics()
    middle = lines[1:PILOT_STEPS]
    evaluations = _evaluations(config, steps) if test_set is not None or config.evaluator_builders else 0
    final = lines[-1] if evaluations else {}

    def total(name: str, once: float = 0.0) -> int:
        return round(_mean(line.get(name, 0.0) for line in middle) * steps + once * evaluations)

    step_seconds = _mean(line["time/total"] for line in middle)
    predicted = Preview(
        steps,
        evaluations,
        total("env/all/total_ac_tokens", final.get("test/env/all/total_ac_tokens", 0.0)),
        total("env/all/total_ob_tokens", final.get("test/env/all/total_ob_tokens", 0.0)),
        total("train/tokens"),
        step_seconds * steps + final.get("time/evaluate:total", 0.0) * evaluations,
        resident_memory(),
    )
    return replace(predicted, enough_for=_enough_for(config, predicted))


def _enough_for(config: Config, run: Preview) -> int | None:
    tokens = run.sampled_tokens + run.prompt_tokens + run.trained_tokens
    shares = [
        budget / max(needed, 1e-9)
        for budget, needed in ((config.budget_tokens, tokens), (config.budget_seconds, run.seconds))
        if budget is not None
    ]
    return int(run.steps * min(shares)) if shares and min(shares) < 1 else None


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _evaluations(config: Config, steps: int) -> int:
    """Before the first step, on schedule, and of the final weights."""
    return -(-steps // config.eval_every) + 1 if config.eval_every else 0


def resident_memory() -> int | None:
    """Memory of this process and its descendants, where /proc tells."""
    if not Path("/proc/self/status").is_file():
        return None
    parents: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        except OSError:  # it ended meanwhile
            continue
        parents[int(folder.name)] = int(status["PPid"])
        sizes[int(folder.name)] = int(status.get("VmRSS", "0 kB").split()[0]) * 1024
    ours = {int(Path("/proc/self").resolve().name)}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(sizes.get(pid, 0) for pid in ours)
