"""Fills the tables of docs/performance.md with the figures in benchmarks/results.

    python benchmarks/performance_page.py [--check]

The page is written by hand except for what stands between `<!-- RESULT: PART -->` and `<!-- end -->`: RESULT is a file
of benchmarks/results, or "summary" for what comes from several; PART is "hardware" or one of `PARTS`. --check changes
nothing, and fails if the page is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
MARKED = re.compile(r"(<!-- (\w+): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
AXES = ("batch", "context", "adapters", "rank")

Result = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Without the columns nothing was measured for."""
    filled = [list(row) for row in rows]
    kept = [n for n in range(len(head)) if not filled or any(str(row[n]) for row in filled)]
    lines = [[line[n] for n in kept] for line in (head, ["---"] * len(head), *filled)]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def number(value: float | None) -> str:
    """Three digits are enough: no figure here repeats better than that."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def hardware(told: Result) -> str:
    facts = told["hardware"]
    where = facts.get("gpu") or f"{facts['cores']} cores of an {facts['cpu']}"
    return f"{where}, torch {facts['torch']}, load {facts['load_at_start']:g} when it began.\n"


def told_by(result: str) -> Result:
    return dict(json.loads((HERE / "results" / f"{result}.json").read_text()))


def summary() -> str:
    """One line for each thing a reader looks for first."""
    through, step, path = told_by("through_server_cpu"), told_by("grpo_step_cpu"), told_by("server_cpu")
    training, sampling = told_by("training_h200"), told_by("sampling_h200")

    def on_cpu(shape: str, case: str) -> tuple[str, ...]:
        row = next(row for row in through["rows"] if (row["shape"], row["case"]) == (shape, case))
        ours, *peers = row["tokens_per_second"].values()
        return f"CPU, {shape}: {case}", number(ours), number(max(peers)), f"{row['ratio']:.1f}"

    def on_gpu(case: str) -> tuple[str, ...]:
        row = next(row for row in sampling["rows"] if (row["shape"], row["case"]) == ("qwen3-0.6b", case))
        ours, peer = row["ours"]["tokens_per_second"], row["transformers_peft"]["tokens_per_second"]
        return f"H200, qwen3-0.6b: sampling, {case}", number(ours), number(peer), f"{row['ratio']:.1f}"

    even = next(row for row in training["rows"] if (row["shape"], row["case"]) == ("qwen3-0.6b", "even"))
    peer = even["peft_tokens_per_second"]
    speeds = [
        on_cpu("small", "forward+backward, 32 x 128"),
        on_cpu("small", "sampling, 32 prompts x 4 x 64"),
        on_cpu("smollm2-135m", "forward+backward, 8 ragged, 16 to 256"),
        on_cpu("smollm2-135m", "forward+backward, a group of 8, 128 + 32"),
        on_cpu("smollm2-135m", "sampling, 1 x 1 x 32"),
        (
            "H200, qwen3-0.6b: forward+backward, 32 x 512",
            number(even["ours_tokens_per_second"]),
            number(peer),
            f"{even['ratio']:.1f}",
        ),
        on_gpu("1024 x 1 x 128"),
        on_gpu("1 x 1 x 128"),
    ]
    seconds, new, cold = step["seconds"], sampling["refresh"], path["cold"]
    added = [ms["added"] for name, ms in path["calls"].items() if name != "both"]
    shares = path["step"]["added_share"], path["larger_step"]["added_share"]
    others = [
        ("a GRPO step of the small model, 8 prompts x 4 x 16 tokens", f"{1000 * seconds['mint']:.0f} ms"),
        ("the same with TRL", f"{1000 * seconds['trl']:.0f} ms"),
        (
            "client, wire, server and journal add to a call, and to a step of "
            + " and of ".join(f"{path[name]['engine']:.0f} ms" for name in ("step", "larger_step")),
            f"{min(added):.1f} to {max(added):.1f} ms; " + ", ".join(f"{share:.0%}" for share in shares),
        ),
        ("H200: what the first token of a new policy takes longer than any other", f"{_refresh(new):.1f} ms"),
        ("from nothing to a first training client and a first sample", f"{cold['in_all']:.1f} s"),
    ]
    head = ["tokens a second", "ours", "transformers + PEFT", "ratio"]
    return table(head, speeds) + "\n" + table(["", "takes"], others)


def _refresh(new: Result) -> float:
    return float(new["snapshot_ms"] + new["first_token_ms"] - new["token_of_a_known_policy_ms"])


def training_cases(told: Result) -> str:
    rows = [row for row in told["rows"] if not _axis(row) and not row["case"].startswith("prompt:answer")]
    return table(
        ["model", "forward and backward", "ours, tokens a second", "transformers + PEFT", "ratio"],
        (
            (
                row["shape"],
                row["case"],
                number(row["ours_tokens_per_second"]),
                number(row.get("peft_tokens_per_second")),
                row.get("ratio", ""),
            )
            for row in rows
        ),
    )


def training_sharing(told: Result) -> str:
    speeds = {row["case"]: row for row in told["rows"] if row["case"].startswith("prompt:answer")}
    rows = []
    for case, row in speeds.items():
        if case.endswith("not shared"):
            continue
        shared, plain = (
            row["ours_tokens_per_second"],
            speeds.get(f"{case}, not shared", {}).get("ours_tokens_per_second"),
        )
        peft = row.get("peft_tokens_per_second")
        gain = f"{shared / plain:.2f}" if plain else ""
        rows.append((case.split()[1], number(shared), number(plain), gain, number(peft)))
    return table(["prompt:answer", "shared, tokens a second", "not shared", "gain", "transformers + PEFT"], rows)


def training_growth(told: Result) -> str:
    rows = [(*_axis(row), row) for row in told["rows"] if _axis(row)]  # type: ignore[misc]
    return "\n".join(
        table(
            [axis, *(str(value) for found, value, _ in rows if found == axis)],
            [["tokens a second", *(number(row["ours_tokens_per_second"]) for found, _, row in rows if found == axis)]],
        )
        for axis in AXES
        if any(found == axis for found, _, _ in rows)
    )


def _axis(row: Result) -> tuple[str, int] | None:
    match = re.fullmatch(rf"({'|'.join(AXES)}) (\d+)", row["case"])
    return (match[1], int(match[2])) if match else None


def memory_cases(told: Result) -> str:
    rows = []
    for row in told["rows"]:
        recordings = f"{row['recordings_gib']:.1f}" if row["recordings_gib"] else ""
        gib = f"{row['training_gib']:.1f}", recordings
        rows.append((row["side"], row["case"], *gib, number(row["tokens_per_second"])))
    return table(["", "data", "GiB of the first pass", "GiB of recordings", "tokens a second"], rows)


def sampling_cases(told: Result) -> str:
    rows = []
    for row in told["rows"]:
        ours, peer = row["ours"], row.get("transformers_peft", {})
        speeds = number(ours["tokens_per_second"]), f"{ours['ms_per_step']:.2f}", number(peer.get("tokens_per_second"))
        rows.append((row["shape"], row["case"], *speeds, f"{row['ratio']:.1f}" if peer else ""))
    head = ["model", "samples", "tokens a second", "ms a step", "transformers + PEFT, tokens a second", "ratio"]
    return table(head, rows)


def sampling_growth(told: Result) -> str:
    parts = []
    for axis in AXES:
        rows = [row for row in told["sweep"] if row["axis"] == axis]
        fixed = {key: rows[0][key] for key in AXES if key != axis}
        others = ", ".join(f"{key} {value}" for key, value in fixed.items())
        lines = [
            ["ms a step", *(f"{row['ms_per_step']:.2f}" for row in rows)],
            ["prompts, ms", *(number(row["prompts_ms"]) for row in rows)],
        ]
        parts.append(table([f"{axis} ({others})", *(str(row["value"]) for row in rows)], lines))
    return "\n".join(parts)


def sampling_agreement(told: Result) -> str:
    gap, new = told["agreement"], told["refresh"]
    meets = new["first_token_ms"] - new["token_of_a_known_policy_ms"]
    return (
        f"Sampler against trainer, {gap['tokens']:,.0f} sampled tokens: mean {gap['mean']:.4f} nats, 99th percentile "
        f"{gap['p99']:.3f}, largest\n{gap['max']:.3f}; mean importance ratio {gap['mean_ratio']:.5f}. A new policy: "
        f"{new['snapshot_ms']:.1f} ms for the copy and its check, and {meets:.1f} ms more\nin the sampler's first step "
        "with it.\n"
    )


def grpo_step_cases(told: Result) -> str:
    names = {"mint": "ours, through client and server", "hand": "by hand on transformers + PEFT", "trl": "TRL"}
    ours = told["seconds"]["mint"]
    head = [f"{told['prompts']} prompts x {told['group']} x {told['tokens']} tokens", "seconds", "ours over it"]
    return table(head, ((names.get(k, k), f"{v:.3f}", f"{ours / v:.2f}") for k, v in told["seconds"].items()))


def server_calls(told: Result) -> str:
    names = {"both": "forward_backward and optim_step, sent together"}
    return table(
        ["milliseconds, medians", "straight to the engine", "through client and server", "added"],
        (
            (names.get(call, call), f"{ms['engine']:.1f}", f"{ms['mint']:.1f}", f"{ms['added']:.1f}")
            for call, ms in told["calls"].items()
        ),
    )


def server_work(told: Result) -> str:
    work, two, cold = told["work"], told["tenants"]["mint"], told["cold"]
    step = "processor time of that step: client, server, engine; share of client and server"
    clock, larger = (
        f"{both['engine']:.0f}, {both['mint']:.0f} ms; {both['added_share']:+.1%}"
        for both in (told["step"], told["larger_step"])
    )
    spent = f"{work['client']:.0f}, {work['server']:.0f}, {work['engine']:.0f} ms; {work['path_share']:.1%}"
    return table(
        ["", ""],
        [
            ("8 prompts x 4 x 16 tokens by the clock: straight to the engine, through client and server; added", clock),
            (step, spent),
            ("16 prompts x 8 x 64 tokens by the clock, likewise", larger),
            ("a thousand samples asked for at once by one client", f"{told['crowd']['mint']:.1f} s"),
            ("two clients stepping at once, over one alone", f"{two['ratio']:.2f}"),
            ("from nothing to the first training client, then to the first sample", _seconds(cold)),
        ],
    )


def _seconds(cold: dict[str, float]) -> str:
    return f"{cold['client']:.1f} s, {cold['sample']:.2f} s"


def through_server_cases(told: Result) -> str:
    rows = []
    for row in told["rows"]:
        speeds = row["tokens_per_second"]
        rows.append((row["shape"], row["case"], *(number(speed) for speed in speeds.values()), row["ratio"]))
    sides = told["rows"][0]["tokens_per_second"]
    return table(["model", "tokens a second", *("ours" if side == "mint" else side for side in sides), "ratio"], rows)


PARTS: dict[tuple[str, str], Callable[[Result], str]] = {
    ("training", "cases"): training_cases,
    ("training", "sharing"): training_sharing,
    ("training", "growth"): training_growth,
    ("memory", "cases"): memory_cases,
    ("sampling", "cases"): sampling_cases,
    ("sampling", "growth"): sampling_growth,
    ("sampling", "agreement"): sampling_agreement,
    ("grpo_step", "cases"): grpo_step_cases,
    ("server", "calls"): server_calls,
    ("server", "work"): server_work,
    ("through_server", "cases"): through_server_cases,
}


def filled(page: str) -> str:
    def fill(match: re.Match[str]) -> str:
        opening, result, part, closing = match.groups()
        if result == "summary":
            return f"{opening}\n{summary()}\n{closing}"
        told = told_by(result)
        make = hardware if part == "hardware" else PARTS[result.rpartition("_")[0], part]
        return f"{opening}\n{make(told)}\n{closing}"

    return MARKED.sub(fill, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    before = PAGE.read_text()
    after = filled(before)
    if asked.check and after != before:
        sys.exit("docs/performance.md differs from benchmarks/results; run python benchmarks/performance_page.py")
    PAGE.write_text(after)


if __name__ == "__main__":
    main()
