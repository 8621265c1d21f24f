"""What the quickstart and the four demos achieve with the bundled model on this machine, seed by seed.

    python benchmarks/demos.py             # quickstart with 5 seeds, each demo with 3: 15 minutes on 2 quiet cores
    python benchmarks/demos.py --render    # only docs/results.md again, from benchmarks/results/demos.json

Runs the scripts as a user does, each in a process and with a local server of its own, with their default settings.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "demos.json"
PAGE = ROOT / "docs" / "results.md"
DEMOS = {
    "verifiable_math": "exact verifier",
    "preference_chat": "judge",
    "environment_tooluse": "tests in a sandbox",
    "agentic": "end of a tool episode",
}
SEEDS = {"quickstart": 5} | dict.fromkeys(DEMOS, 3)
STEP = re.compile(r"^Step \d+: (?:accuracy=([\d.]+)%|avg_reward=([\d.]+)), datums=(\d+)", re.MULTILINE)
T95 = {3: 4.303, 5: 2.776}  # Student's t for a 95 % interval of the mean, by number of seeds


@dataclass
class Result:
    script: str
    seed: int
    curve: list[float]
    """Quickstart: holdout accuracy of the base model, after SFT, then after every step of GRPO. Demos: what each step
    printed, the accuracy or mean reward of the answers it sampled, before its update."""
    seconds: float
    load: float
    """Load average of the machine at the start: much above zero, others were at work and seconds are too high."""


def run(script: str, seed: int) -> Result:
    path = "quickstart.py" if script == "quickstart" else f"demos/rl/adapters/{script}.py"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MINT_", "TINKER_"))}
    load, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / path)],
            cwd=folder,
            env=clean | {"MINT_SEED": str(seed), "MINT_RL_SEED": str(seed), "MINT_HOME": folder},
            capture_output=True,
            text=True,
        )
        seconds = time.monotonic() - started
        if done.returncode:
            raise SystemExit(f"{path} with seed {seed} failed:\n{done.stderr[-4000:]}")
        if script == "quickstart":
            (metrics,) = Path(folder).glob("runs/*/metrics.jsonl")
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            curve = [line["holdout_accuracy"] for line in lines if "holdout_accuracy" in line]
        else:
            curve = [float(percent) / 100 if percent else float(mean) for percent, mean, _ in STEP.findall(done.stdout)]
    return Result(script, seed, curve, round(seconds, 1), round(load, 2))


def machine() -> dict[str, Any]:
    described = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", described.read_text()) if described.exists() else None
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "date": date.today().isoformat(),
    }


# ---------------------------------------------------------------------------------------------------- the page


TEMPLATE = """\
# Results

Made by `python benchmarks/demos.py`, which runs the scripts as a user does, with their default settings and the bundled
model `mint/tiny`. The raw numbers, every step of every run, are in `benchmarks/results/demos.json`.

Machine: {cpu}, {cores} cores, no GPU, {system}; Python {python}, torch {torch}, transformers {transformers}; {date}.
Load average at the start of the runs: {low:.1f} to {high:.1f}. Other work shared the machine, so the seconds (start of
server and client included) are upper bounds; what is learned does not depend on them.

## Quickstart

`quickstart.py`, {seeds} seeds: accuracy on 200 additions that neither model nor script has trained on, sampled at
temperature 0.8, and the mean with its 95 % interval. GRPO gained 40 points or more with {gained} of {seeds} seeds.

{quickstart}

## Demos

`demos/rl/adapters/*.py`, three seeds each: accuracy (for chat, mean reward) of the answers sampled while training, at
temperature 1.0 and before each update. It rose in {risen} of {runs} runs.

{demos}
"""


def before_after(result: Result) -> tuple[float, float]:
    """Quickstart: where GRPO began and ended, on the holdout. Demos: the first three steps and the last three."""
    if result.script == "quickstart":
        return result.curve[1], result.curve[-1]
    return statistics.mean(result.curve[:3]), statistics.mean(result.curve[-3:])


def points(result: Result) -> float:
    first, last = before_after(result)
    return 100 * (last - first)


def with_interval(values: list[float], digits: str) -> str:
    half = T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):{digits}} ± {half:{digits}}"


def table(*rows: list[str]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def quickstart_table(results: list[Result]) -> str:
    stages = (0, 1, -1)
    rows = [
        [str(r.seed), *(f"{r.curve[i]:.1%}" for i in stages), f"{points(r):+.1f}", f"{r.seconds:.0f}"] for r in results
    ]
    means = [with_interval([r.curve[i] for r in results], ".1%") for i in stages]
    gain, seconds = with_interval([points(r) for r in results], ".1f"), statistics.mean(r.seconds for r in results)
    head = ["seed", "base model", "after SFT", "after GRPO", "points gained by GRPO", "seconds"]
    return table(head, *rows, ["**mean**", *means, gain, f"{seconds:.0f}"])


def demo_table(results: list[Result]) -> str:
    rows = []
    for r in results:
        first, last = before_after(r)
        rows.append([f"`{r.script}`", DEMOS[r.script], str(len(r.curve)), str(r.seed), f"{first:.3f}", f"{last:.3f}"])
        rows[-1].append(f"{r.seconds:.0f}")
    return table(["demo", "reward", "steps", "seed", "first 3 steps", "last 3 steps", "seconds"], *rows)


def page(stored: dict[str, Any]) -> str:
    results = [Result(**entry) for entry in stored["results"]]
    quickstart, demos = ([r for r in results if (r.script == "quickstart") == wanted] for wanted in (True, False))
    return TEMPLATE.format(
        **stored["machine"],
        low=min(r.load for r in results),
        high=max(r.load for r in results),
        seeds=len(quickstart),
        gained=sum(points(r) >= 40 for r in quickstart),
        quickstart=quickstart_table(quickstart),
        risen=sum(points(r) > 0 for r in demos),
        runs=len(demos),
        demos=demo_table(demos),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the page again")
    if not parser.parse_args().render:
        results: list[Result] = []
        columns = (TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns) as bar:
            task = bar.add_task("", total=sum(SEEDS.values()))
            for script, seeds in SEEDS.items():
                for seed in range(seeds):
                    bar.update(task, description=f"{script}, seed {seed}")
                    results.append(run(script, seed))
                    bar.advance(task)
        stored = {"machine": machine(), "results": [asdict(result) for result in results]}
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    stored = json.loads(RESULTS.read_text())
    PAGE.write_text(page(stored))
    print(PAGE.read_text())
    print(json.dumps({r["script"] + f"/{r['seed']}": before_after(Result(**r)) for r in stored["results"]}))


if __name__ == "__main__":
    main()
