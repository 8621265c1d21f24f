"""Makes docs/reliability.md of the results of load.py, capacity.py and fuzz.py.

    python benchmarks/load.py --minutes 10 --out benchmarks/results/load.json
    python benchmarks/capacity.py --out benchmarks/results/capacity.json
    python benchmarks/fuzz.py --examples 200 --out benchmarks/results/fuzz.json
    python benchmarks/reliability_page.py [--check]

Sections whose result is missing are left out. With `--check` nothing is written: the status says whether the page is
what the results make of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reliability.md"
FLAT_PERCENT = 5.0


def load_section(told: dict[str, Any]) -> str:
    shares, memory = told["rounds_of_a_client"], told["memory"]
    errors = sum(told["errors"].values())
    looks = told["looks"]
    rows = "\n".join(
        f"| {kind} | {times['median']} | {times['p95']} | {times['p99']} | {times['most']} |"
        for kind, times in told["seconds_of_a_call"].items()
        if times
    )
    growth = "\n".join(
        f"| {who} | {m['start_mib']} | {m['third_quarter_mib']} | {m['last_quarter_mib']} | {m['growth_percent']:+} % "
        f"| {m['most_mib']} |"
        for who, m in memory.items()
        if m
    )
    marks = [looks[i * (len(looks) - 1) // 9] for i in range(10)] if len(looks) >= 10 else looks
    course = "\n".join(
        f"| {look['seconds']:.0f} | {look['server_bytes'] >> 20} | {look['engine_bytes'] >> 20} | {look['results']} "
        f"| {look['adapters']['device']} / {look['adapters']['disk']} |"
        for look in marks
    )
    flat = all(m and abs(m["growth_percent"]) <= FLAT_PERCENT for m in memory.values())
    return f"""## Load

`python benchmarks/load.py`: {told["clients"]} clients at once, each with a session and an adapter of its own
(ranks 1 to 32), sample, train a step and take a snapshot without a pause for {told["minutes"]:g} minutes; at most
{told["max_adapters"]} adapters on the device. {told["hardware"]}{told.get("note", "")}.

| | |
|---|---|
| errors seen by clients | {errors} |
| errors in the server's log | {len(told["server_errors"])} |
| engine restarts | {told["engine_restarts"]} |
| rounds in all | {told["rounds"]} |
| rounds of a client: least, median, most | {shares["least"]}, {shares["median"]:g}, {shares["most"]} |
| Jain's index of fairness (1: all equal) | {shares["jain_index"]} |
| tokens sampled, trained | {told["tokens_sampled"]:.0f}, {told["tokens_trained"]:.0f} |
| memory flat within {FLAT_PERCENT:g} % | {"yes" if flat else "no"} |

Seconds a call takes, waiting for {told["clients"] - 1} others included:

| | median | p95 | p99 | most |
|---|---|---|---|---|
{rows}

Resident memory in MiB; growth is the mean of the last quarter of the run over that of the third:

| | start | third quarter | last quarter | growth | most |
|---|---|---|---|---|---|
{growth}

Memory grows while things are kept on purpose: results for 330 s after they were fetched, for clients that ask again,
and snapshots for 120 s; so a run says something from its sixth minute on. Two things are done against growth beyond
that, both found by counting Python's objects and the allocator's bytes in such runs. Tensors are read into memory of
their own: safetensors 0.8.0 never frees two integers for every tensor it reads through a mapping, which left 755
objects a training round where adapters come back from disk (1.5 without). And what idle adapters leave is given back to
the system every ten seconds, which takes 1 to 8 ms: glibc keeps what lies between others' memory, 187 of 790 MiB in a
run of 60 clients.

| second | server MiB | engine MiB | results kept | adapters on device / disk |
|---|---|---|---|---|
{course}
"""


def capacity_section(told: dict[str, Any]) -> str:
    few, everything = told["few_fit"], told["all_fit"]
    return f"""## More adapters than fit

`python benchmarks/capacity.py`: {told["clients"]} clients of ranks 1 to 64 by turns where {told["fit"]} adapters fit,
on {told["hardware"]} ({told["device"]}), against the same work where all fit. This is the worst case: nearly every call
needs an adapter that is on disk.

| | all fit | {told["fit"]} fit |
|---|---|---|
| seconds a round (median of {told["rounds"]}) | {everything["round_seconds"]} | {few["round_seconds"]} |
| of the processor | {everything["round_processor_seconds"]} | {few["round_processor_seconds"]} |
| adapters brought back, in all | {everything["returns"]} | {few["returns"]} |

Results equal to the last bit: {"yes" if told["equal_to_the_bit"] else "NO"}. A round takes {told["slowdown"]} times as
long: {told["ms_a_return"]} ms for each adapter brought back ({told["processor_ms_a_return"]} ms of the processor),
which includes writing the one that made room.
"""


def fuzz_section(told: dict[str, Any]) -> str:
    statuses = ", ".join(f"{status}: {count}" for status, count in told["statuses"].items())
    return f"""## Bad input

`python benchmarks/fuzz.py`: {told["requests"]} requests drawn by schemathesis from the OpenAPI page, over all
{told["operations"]} operations. Statuses: {statuses}. Ready afterwards: {"yes" if told["ready_afterwards"] else "NO"}.
"""


SECTIONS = {"load": load_section, "capacity": capacity_section, "fuzz": fuzz_section}


def page() -> str:
    parts = [
        "# Reliability, measured\n\nWritten by `benchmarks/reliability_page.py` from `benchmarks/results`. What is "
        "promised, and by\nwhich means, is in [durability](durability.md), with the figures of kills, and\n"
        "[operations](operations.md).\n"
    ]
    for name, section in SECTIONS.items():
        file = HERE / "results" / f"{name}.json"
        if file.exists():
            parts.append(section(json.loads(file.read_text())))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    if parser.parse_args().check:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE} is not what the results make of it; run this again.")
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
