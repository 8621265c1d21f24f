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
from typing import Any

from mint.recipes import RECIPES
from mint.rl.rundir import RunDir

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- begin: made by benchmarks/recipes.py -->", "<!-- end -->"
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
                write_page(result)
    print(json.dumps({"benchmark": "recipes", **result}))


def table(result: dict[str, Any]) -> str:
    """For docs/recipes.md: means over the seeds, the range of what was reached."""
    rows = ["| recipe | steps | holdout before | after | seconds |", "|---|---|---|---|---|"]
    for recipe in RECIPES:
        runs = [run for run in result["runs"] if run["recipe"] == recipe]
        if not runs:
            continue
        after = [run["after"] for run in runs]
        before, seconds = (sum(run[name] for run in runs) / len(runs) for name in ("before", "seconds"))
        reached = f"{sum(after) / len(after):.2f} ({min(after):.2f} to {max(after):.2f})"
        rows.append(f"| `{recipe}` | {runs[0]['steps']} | {before:.2f} | {reached} | {seconds:.0f} |")
    facts = result["machine"]
    loads = [run["load_at_start"] for run in result["runs"]]
    note = (
        f"Means over the seeds 0 to {max(run['seed'] for run in result['runs'])}; {facts['cores']} cores, "
        f"{facts['device']}, {facts['system']}, torch {facts['torch']}, {facts['date']}. Other work shared the machine "
        f"(load average {min(loads):.0f} to {max(loads):.0f} at the start of the runs), so the seconds, start of the "
        "server included, are upper bounds."
    )
    return "\n".join([*rows, "", note])


def write_page(result: dict[str, Any]) -> None:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n\n{table(result)}\n\n{END}{rest.partition(END)[2]}")


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
