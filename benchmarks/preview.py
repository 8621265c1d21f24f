"""How well a preview predicts what a run then takes, on the bundled model.

    python benchmarks/preview.py

Prints a table, then one line of JSON, which is also written to benchmarks/results/preview.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from planted_faults import BASE, Additions
from rich.progress import track

import mint
from mint.rl.config import Config
from mint.rl.preview import preview, resident_memory
from mint.rl.train import main as train

RESULTS = Path(__file__).parent / "results" / "preview.json"
CASES: dict[str, Config] = {
    "8 groups of 4, 20 steps": replace(BASE, dataset_builder=Additions(batches=20)),
    "16 groups of 8, 20 steps": replace(BASE, dataset_builder=Additions(groups=16, group_size=8, batches=20)),
    "one step behind, ppo, KL": replace(
        BASE, dataset_builder=Additions(groups=12, batches=20), max_lag=1, loss_fn="ppo", kl_penalty_coef=0.05
    ),
}


async def measure(config: Config, folder: Path, service: mint.ServiceClient) -> dict[str, Any]:
    config = replace(config, log_path=str(folder))
    predicted = await preview(config, service)
    began = time.perf_counter()
    lines = (await train(config, service)).metrics()
    seconds = time.perf_counter() - began
    took = {
        "sampled_tokens": _total(lines, "env/all/total_ac_tokens"),
        "prompt_tokens": _total(lines, "env/all/total_ob_tokens"),
        "trained_tokens": sum(line.get("train/tokens", 0) for line in lines),
        "seconds": seconds,
        "memory_bytes": resident_memory(),
    }
    return {
        name: {"predicted": getattr(predicted, name), "took": value, "error": getattr(predicted, name) / value - 1}
        for name, value in took.items()
        if value
    }


def _total(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line.get(prefix + name, 0) for line in lines for prefix in ("", "test/"))


async def main() -> None:
    service = mint.ServiceClient()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: await measure(config, Path(folder) / str(number), service)
            for number, (name, config) in enumerate(track(list(CASES.items()), "runs"))
        }
    for name, figures in runs.items():
        for what, values in figures.items():
            print(
                f"{name:28} {what:15} {values['predicted']:>14,.0f} {values['took']:>14,.0f} {values['error']:>+7.1%}"
            )
    result = {"hardware": f"{os.cpu_count()} cores, {platform.machine()}", "runs": runs}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
