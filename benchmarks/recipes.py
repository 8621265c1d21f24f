"""What every recipe of the package reaches and how long it takes, run as a user does: `mint train NAME`.

    python benchmarks/recipes.py [--seeds 3] [--recipe addition ...]

Prints a table, writes benchmarks/results/recipes.json, ends with one line of JSON. docs/recipes.md shows the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mint.recipes import RECIPES
from mint.rl.rundir import RunDir

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
HOLDOUT = "test/env/all/reward/total"


def measure(recipe: str, seed: int, folder: Path) -> dict[str, object]:
    log_path = folder / f"{recipe}-{seed}"
    settings = ["--seed", str(seed), "--dataset-builder.seed", str(seed), "--log-path", str(log_path)]
    load = os.getloadavg()[0]
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "mint.cli", "train", recipe, *settings], check=True, stdout=subprocess.DEVNULL
    )
    seconds = time.monotonic() - start
    lines = RunDir(log_path).metrics()
    held_out = [line[HOLDOUT] for line in lines if HOLDOUT in line]
    steps = sum("env/all/reward/total" in line for line in lines)
    return {
        "recipe": recipe, "seed": seed, "steps": steps, "before": held_out[0], "after": held_out[-1],
        "seconds": round(seconds, 1), "load_at_start": round(load, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipe", action="append", choices=list(RECIPES))
    options = parser.parse_args()
    before = json.loads(RESULTS.read_text())["runs"] if RESULTS.is_file() else []
    runs = {(run["recipe"], run["seed"]): run for run in before}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in options.recipe or RECIPES:
            for seed in range(options.seeds):
                runs[recipe, seed] = one = measure(recipe, seed, Path(folder))
                print(
                    f"{recipe:12} seed {seed}: {one['before']:.3f} -> {one['after']:.3f} in {one['seconds']} s",
                    flush=True,
                )
                result = {"machine": machine(), "runs": list(runs.values())}
                RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"benchmark": "recipes", **result}))


def machine() -> dict[str, object]:
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
