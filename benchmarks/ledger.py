"""Does the difficulty band raise the share of groups with signal? On a pool of problems half of which are hopeless.

    python benchmarks/ledger.py

The pool: 32 additions of two-digit numbers, which the bundled model can learn, and 32 of three-digit ones, which it
cannot. The same runs with `difficulty_band=(0.2, 0.8)` and without, three seeds each. Prints a table, then one line of
JSON, which is also written to benchmarks/results/ledger.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planted_faults import BASE, Additions
from rich.progress import track

import mint
from mint.rl.datasets import ListRLDataset
from mint.rl.envs import ProblemGroupBuilder
from mint.rl.train import train
from mint.rl.types import RLDataset

RESULTS = Path(__file__).parent / "results" / "ledger.json"
BAND = (0.2, 0.8)
STEPS = 30
SEEDS = range(3)


@dataclass(frozen=True)
class HalfHopeless(Additions):
    """Every second problem has three digits a number; going through the pool takes eight steps."""

    tests: int = 64
    batches: int = 4

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        easy, test = await super().__call__()
        hard, _ = await replace(Additions(), digits=3, batches=self.batches, seed=self.seed)()
        problems: list[ProblemGroupBuilder] = []
        for index in range(len(easy)):
            for pair in zip(easy.get_batch(index), hard.get_batch(index), strict=True):
                problems += pair
        return ListRLDataset(problems, self.groups, seed=self.seed), test


def measure(band: tuple[float, float] | None, seed: int, folder: Path, service: mint.ServiceClient) -> dict[str, Any]:
    config = replace(
        BASE,
        dataset_builder=HalfHopeless(seed=seed),
        difficulty_band=band,
        max_steps=STEPS,
        seed=seed,
        eval_every=STEPS,
        log_path=str(folder / f"{band}-{seed}"),
    )
    lines = train(config, service).metrics()
    mixed = [line["env/all/by_group/frac_mixed"] for line in lines[:STEPS]]
    return {
        "band": band,
        "seed": seed,
        "signal": statistics.mean(mixed),
        "signal_second_half": statistics.mean(mixed[STEPS // 2 :]),
        "holdout_before": lines[0]["test/env/all/reward/total"],
        "holdout_after": lines[-1]["test/env/all/reward/total"],
        "dead": lines[STEPS - 1]["ledger/dead"],
    }


def main() -> None:
    service = mint.ServiceClient()
    cases = [(band, seed) for seed in SEEDS for band in (None, BAND)]
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(band, seed, Path(folder), service) for band, seed in track(cases, "runs")]
    print(f"{'band':>12} {'seed':>4} {'signal':>7} {'2nd half':>9} {'holdout':>16} {'dead':>5}")
    for r in runs:
        gain = f"{r['holdout_before']:.2f} -> {r['holdout_after']:.2f}"
        signal = f"{r['signal']:>7.0%} {r['signal_second_half']:>9.0%}"
        print(f"{r['band']!s:>12} {r['seed']:>4} {signal} {gain:>16} {r['dead']:>5.0f}")
    result = {"hardware": f"{os.cpu_count()} cores, {platform.machine()}", "steps": STEPS, "runs": runs}
    for name, band in (("without", None), ("with_band", BAND)):
        result[name] = {
            key: round(statistics.mean(r[key] for r in runs if r["band"] == band), 3)
            for key in ("signal", "signal_second_half", "holdout_before", "holdout_after")
        }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
