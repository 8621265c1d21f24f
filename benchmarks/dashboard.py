"""How quick the dashboard is on a long run: 2,000 generated steps, 100,000 rollouts, measured in a browser.

    python benchmarks/dashboard.py                                  # 2,000 steps, 50 rollouts each, 60 tokens each
    python benchmarks/dashboard.py --folder /tmp/long --keep        # and leave the folder for looking at

Prints a table and, last, one line of JSON. Needs Playwright for Python and Chromium (path in CHROMIUM, else Debian's).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from mint.rl.rundir import CheckpointRecord, RolloutRecord, RunDir, TurnRecord, append_jsonl

WORDS = [
    "so",
    "the",
    "sum",
    "of",
    "both",
    "is",
    "first",
    "add",
    "tens",
    "then",
    "ones",
    "which",
    "gives",
    "carry",
    "one",
    "and",
    "therefore",
    "answer",
]

AHEAD = 100
"""Steps the run still has to do when it is looked at."""


def rollouts(
    step: int, groups: int, members: int, tokens: int, progress: float, rng: random.Random
) -> list[RolloutRecord]:
    """What a step of a task with right and wrong answers looks like, for a policy that gets better."""
    records = []
    for group in range(groups):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        prompt = f"What is {a} + {b}? Think step by step."
        rewards = [float(rng.random() < 0.2 + 0.7 * progress) for _ in range(members)]
        mean = sum(rewards) / members
        for member, reward in enumerate(rewards):
            pieces = [f" {rng.choice(WORDS)}" for _ in range(tokens - 1)] + [f" {a + b if reward else a + b + 10}"]
            logprobs = [-rng.expovariate(2.0) for _ in pieces]
            train = [p + rng.gauss(0, 0.01) for p in logprobs]
            records.append(
                RolloutRecord(
                    step=step,
                    group=group,
                    member=member,
                    policy_version=step,
                    temperature=1.0,
                    reward=reward,
                    reward_terms={"correct": reward},
                    advantage=reward - mean,
                    trained=mean not in (0.0, 1.0),
                    stop_reason="completed",
                    problem=f"{a} + {b}",
                    prompt_text=prompt,
                    completion_text="".join(pieces),
                    prompt_tokens=list(range(12)),
                    completion_tokens=[rng.randrange(30000) for _ in pieces],
                    completion_pieces=pieces,
                    mask=[1] * tokens,
                    logprobs=logprobs,
                    train_logprobs=train,
                    reference_logprobs=[p - 0.3 * progress * rng.random() for p in logprobs],
                    advantages=[reward - mean] * tokens,
                    turns=[TurnRecord(0, tokens, reward, logs={"reference": str(a + b)})],
                )
            )
    return records


def metrics(step: int, steps: int, records: list[RolloutRecord], rng: random.Random) -> dict[str, float]:
    progress, reward = step / steps, sum(r.reward for r in records) / len(records)
    named = {
        "progress/done_frac": (step + 1) / steps, "optim/lr": 1e-4 * (1 - progress), "sampling/temperature": 1.0,
        "env/all/reward/total": reward, "env/all/reward/success": reward,
        "env/all/by_group/frac_mixed": 0.9 - progress / 2, "env/all/by_group/frac_all_good": progress / 2,
        "env/all/by_group/frac_all_bad": 0.1,
        "env/all/ac_tokens_per_turn": 60 + 5 * rng.random(), "env/all/truncated": 0.02, "env/all/duplicates": 0.1,
        "env/all/total_ac_tokens": 3000.0, "train/tokens": 2800.0,
        "kl_policy_base": 0.3 * progress + 0.01 * rng.random(),
        "optim/entropy": 1.2 - 0.8 * progress, "train/ratio:mean": 1.0, "train/ratio:max": 1.1, "train/ratio:min": 0.9,
        "optim/grad_norm": 2 * rng.random(), "time/total": 4.0, "time/sample:total": 2.0, "time/train:total": 1.5,
        "ledger/solved": 10 * progress, "ledger/learning": 30.0, "ledger/dead": 2.0,
    }  # fmt: skip
    named |= {f"env/extra/metric_{i}": rng.random() for i in range(40)}  # a real run has some eighty
    if step % 20 == 0:
        named["test/env/all/reward/total"] = 0.2 + 0.6 * progress
    return named


def write_step(run: RunDir, step: int, steps: int, groups: int, members: int, tokens: int, rng: random.Random) -> None:
    records = rollouts(step, groups, members, tokens, step / steps, rng)
    run.write_rollouts(step, records)
    by_group: dict[int, list[RolloutRecord]] = {}
    for record in records:
        by_group.setdefault(record.group, []).append(record)
    rates = [(some[0].problem, sum(r.reward for r in some) / len(some)) for some in by_group.values()]
    visits = [{"problem": p, "rate": rate, "of": members, "signal": rate not in (0, 1)} for p, rate in rates]
    append_jsonl(run.ledger_file, {"step": step, "groups": visits})
    run.append_metrics(step, metrics(step, steps, records, rng))


def write_run(folder: Path, steps: int, groups: int, members: int, tokens: int, done: int | None = None) -> RunDir:
    """A run of `steps` steps of which `done` are done."""
    run, rng = RunDir(folder), random.Random(0)
    config = {"log_path": str(folder), "recipe_name": "generated", "model_name": "none", "seed": 0, "max_steps": steps}
    run.write_config(config)
    for step in range(steps if done is None else done):
        write_step(run, step, steps, groups, members, tokens, rng)
        if step and step % 200 == 0:
            run.append_checkpoint(CheckpointRecord(f"{step:06d}", step, f"tinker://x/weights/{step:06d}"))
    return run


# --------------------------------------------------------------------------------------------------------------------


def resident(pid: int) -> float:
    """MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def measure(folder: Path, steps: int) -> dict[str, float]:
    from playwright.sync_api import Page, sync_playwright

    command = [sys.executable, "-m", "mint.cli", "dashboard", str(folder), "--port", "0"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert child.stdout is not None
    address = next(word for word in next(child.stdout).split() if word.startswith("http://"))
    found = {"memory_at_start_mib": resident(child.pid)}

    def timed(action: Callable[[], object]) -> float:
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    def open_and_wait(page: Page, path: str, selector: str) -> None:
        page.goto(address + path)
        page.wait_for_selector(selector)

    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1366, "height": 768})
            found["runs_first_s"] = timed(lambda: open_and_wait(page, "/", ".q-table tbody tr"))
            found["runs_again_s"] = timed(lambda: open_and_wait(page, "/", ".q-table tbody tr"))
            found["run_s"] = timed(lambda: open_and_wait(page, "/run/long", ".charts canvas"))
            chosen = [random.Random(1).randrange(steps) for _ in range(5)]
            opened = [timed(lambda s=step: open_and_wait(page, f"/step/long?step={s}", ".t")) for step in chosen]  # type: ignore[misc]
            found["step_s"] = median(opened)

            def next_group() -> None:
                before = page.locator(".promptbox").inner_text()
                page.keyboard.press("j")
                page.wait_for_function("before => document.querySelector('.promptbox').innerText != before", arg=before)

            found["next_group_s"] = median(timed(next_group) for _ in range(4))
            found["ledger_s"] = timed(lambda: open_and_wait(page, "/ledger/long", ".strip"))
            page.goto(f"{address}/run/long")
            page.wait_for_selector(".charts canvas")
            page.wait_for_timeout(3000)
            lags = []
            run, rng = RunDir(folder / "long"), random.Random(2)
            for step in range(steps, steps + 5):
                write_step(run, step, steps + AHEAD, 5, 10, 60, rng)
                shown = f"document.querySelector('.tiles').innerText.includes('{step + 1}')"
                lags.append(timed(lambda shown=shown: page.wait_for_function(shown)))  # type: ignore[misc]
            found["live_s"] = median(lags)
            browser.close()
        found["memory_after_mib"] = resident(child.pid)
    finally:
        child.terminate()
        child.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="dashboard-"))
    if not (folder / "long").is_dir():
        write_run(folder / "long", given.steps + AHEAD, 5, 10, 60, done=given.steps)
    files = [file for file in folder.rglob("*") if file.is_file()]
    facts = {"steps": given.steps, "rollouts": 50 * given.steps, "mib": sum(f.stat().st_size for f in files) / 2**20}
    found = measure(folder, given.steps)
    if not given.keep:
        shutil.rmtree(folder)
    for name, value in (facts | found).items():
        print(f"{name:>20}  {value:,.2f}")
    print(json.dumps(facts | found | {"machine": platform.machine(), "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
