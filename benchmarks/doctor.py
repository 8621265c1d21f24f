"""How often the doctor names a planted fault, and how often it cries wolf: real runs of the bundled model.

    python benchmarks/doctor.py            # all runs again (about twenty minutes), results and docs/doctor.md
    python benchmarks/doctor.py --record   # also packs the runs into tests/data/doctor_runs.tar.xz
    python benchmarks/doctor.py --runs X   # keeps the runs in folder X and takes those already there as they are
    python benchmarks/doctor.py --again    # makes no run: the doctor of today on the runs recorded for the tests
    python benchmarks/doctor.py --report   # only docs/doctor.md, from the committed results

Faults and clean runs are in planted_faults.py (in the library's loop), own_loop_faults.py (in a loop on the raw client)
and agent_loop.py (in one with several turns and a tool). Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tarfile
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from agent_loop import AGENT_CLEAN, AGENT_FAULTS
from own_loop_faults import OWN_CLEAN, OWN_FAULTS, OwnLoop
from planted_faults import CLEAN, FAULTS, Fault
from rich.progress import track

import mint
from mint.rl.doctor import Watch, diagnose
from mint.rl.doctor.evidence import Evidence, read_evidence, samples_of
from mint.rl.doctor.report import examine
from mint.rl.rundir import RunDir, read_jsonl, write_jsonl

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "doctor.json"
RECORDED = ROOT / "tests" / "data" / "doctor_runs.tar.xz"
PAGE = ROOT / "docs" / "doctor.md"
TEXT = ROOT / "benchmarks" / "doctor_page.md"
PLACES = ("log_path", "base_url", "dataset_source")
DECIMALS = 6
LOOK_EVERY = 5
RUNS: dict[str, list[Fault | OwnLoop]] = {
    "faults": [*FAULTS, *OWN_FAULTS, *AGENT_FAULTS],
    "clean": [*CLEAN, *OWN_CLEAN, *AGENT_CLEAN],
}


def folder_name(fault: Fault | OwnLoop) -> str:
    return fault.name.replace(" ", "_").replace(",", "").replace("'", "")


def run(fault: Fault | OwnLoop, folder: Path, service: mint.ServiceClient | None) -> dict[str, Any]:
    """Without a service the run must be there."""
    path = folder / folder_name(fault)
    run_dir = RunDir(path) if service is None or path.is_dir() else fault.make(path, service)
    read = read_evidence(run_dir)
    took = [step.metrics["time/total"] for step in read.steps if "time/total" in step.metrics]
    return {
        "name": fault.name,
        "steps": len(read.steps),
        "expected": fault.finding,
        "findings": [{"kind": f.kind, "severity": f.severity, "sentence": f.sentence} for f in diagnose(run_dir)],
        "live": told_live(run_dir),
        "milliseconds_a_look": round(1000 * cost_of_a_look(run_dir, read), 1),
        "seconds_a_step": round(statistics.median(took), 3) if took else None,
    }


def told_live(run_dir: RunDir) -> list[str]:
    """What the loop said, or would have said, while it ran: its watch, given the run step by step."""
    told = []
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(RunDir(folder), run_dir.config() or {}, LOOK_EVERY)
        for line in run_dir.metrics():
            step = line["step"]
            if step in run_dir.rollout_steps("test"):
                watch.add_evaluation(step, "test", run_dir.rollouts(step, "test"))
            if step in run_dir.rollout_steps():
                watch.add_step(step, {k: v for k, v in line.items() if k != "step"}, run_dir.rollouts(step))
                told += watch.look_if_due(step)
    return [finding.kind for finding in told]


def cost_of_a_look(run_dir: RunDir, read: Evidence) -> float:
    """Seconds of the processor the loop spends on the doctor every five steps: five steps reduced to samples, one
    examination."""
    records = [run_dir.rollouts(step.number) for step in read.steps[-LOOK_EVERY:]]
    began = time.process_time()
    for some in records:
        samples_of(some)
    examine(Evidence(read.config, read.steps, read.evaluations))  # fresh, without what was worked out before
    return time.process_time() - began


def record(folder: Path) -> None:
    """The runs as the tests read them: without what no check looks at, numbers cut to what matters."""
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as copy, tarfile.open(RECORDED, "w:xz", preset=9) as archive:
        for fault in (fault for runs in RUNS.values() for fault in runs):
            source, target = folder / folder_name(fault), Path(copy) / folder_name(fault)
            shutil.copytree(source / "rollouts", target / "rollouts")
            shutil.copy(source / "metrics.jsonl", target)
            config = json.loads((source / "config.json").read_text())
            (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in PLACES}))
            for file in target.glob("rollouts/*.jsonl"):
                write_jsonl(file, [_rounded(line) for line in read_jsonl(file)])
            archive.add(target, folder_name(fault), filter=_anonymous)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DECIMALS)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def named(result: dict[str, Any]) -> bool:
    return bool(result["findings"]) and result["findings"][0]["kind"] == result["expected"]


def above_notice(result: dict[str, Any]) -> list[str]:
    return [finding["kind"] for finding in result["findings"] if finding["severity"] != "notice"]


def page(results: dict[str, Any]) -> str:
    faults, clean = results["faults"], results["clean"]
    rows = ["| planted | first in the report | also | said while running |", "|---|---|---|---|"]
    for result in faults:
        kinds = [finding["kind"] for finding in result["findings"]]
        first = f"`{kinds[0]}`" if kinds else "nothing"
        wrong = "" if named(result) else f" (**missed**, expected `{result['expected']}`)"
        also = ", ".join(kinds[1:]) or " "
        live = "yes" if result["expected"] in result["live"] else "no"
        rows.append(f"| {result['name']} | {first}{wrong} | {also} | {live} |")
    clean_rows = ["| clean run | above notice | notices |", "|---|---|---|"]
    for result in clean:
        notices = ", ".join(f["kind"] for f in result["findings"] if f["severity"] == "notice") or " "
        clean_rows.append(f"| {result['name']} | {', '.join(above_notice(result)) or 'none'} | {notices} |")
    alarmed = sum(bool(above_notice(result)) for result in clean)
    milliseconds = statistics.median(r["milliseconds_a_look"] for r in [*faults, *clean])
    seconds = statistics.median(r["seconds_a_step"] for r in [*faults, *clean] if r["seconds_a_step"])
    return TEXT.read_text().format(
        faults=len(faults),
        in_library=len(FAULTS),
        in_own_loop=len(OWN_FAULTS),
        in_agent=len(AGENT_FAULTS),
        named=sum(map(named, faults)),
        live=sum(result["expected"] in result["live"] for result in faults),
        clean=len(clean),
        alarmed=alarmed,
        bound=f"{1 - 0.05 ** (1 / len(clean)):.0%}" if not alarmed else "see the table",
        fault_table="\n".join(rows),
        clean_table="\n".join(clean_rows),
        milliseconds=milliseconds,
        share=milliseconds / 1000 / (LOOK_EVERY * seconds),
        hardware=results["hardware"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    if not options.report:
        service = None if options.again else mint.ServiceClient()
        with nullcontext(options.runs) if options.runs else tempfile.TemporaryDirectory() as folder:
            if options.again:
                with tarfile.open(RECORDED) as archive:
                    archive.extractall(folder, filter="data")
            results: dict[str, Any] = {"hardware": f"{os.cpu_count()} cores, {platform.machine()}"}
            for kind, runs in RUNS.items():
                results[kind] = [run(fault, Path(folder), service) for fault in track(runs, kind)]
            if options.record:
                record(Path(folder))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(page(results))
    for result in results["faults"]:
        print("named " if named(result) else "MISSED", result["name"], [f["kind"] for f in result["findings"]])
    for result in results["clean"]:
        print("quiet " if not above_notice(result) else "WOLF  ", result["name"], above_notice(result))
    summary = {
        "faults": len(results["faults"]),
        "named": sum(map(named, results["faults"])),
        "clean": len(results["clean"]),
        "false_alarms": sum(bool(above_notice(result)) for result in results["clean"]),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
