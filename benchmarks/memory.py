"""Peak memory of training, and what it costs in speed: the engine, lean and not, beside transformers + PEFT.

    python benchmarks/memory.py [--device cuda] [--against peft] [--out FILE]

Rank 16 on every linear of attention and MLP, one forward and backward pass over the batch: Qwen3-0.6B's shape in
bfloat16 on a GPU, SmolLM2-135M's in float32 on a CPU. What training takes is the most that was held in the first pass,
less what was held before (weights and, for the engine, the sampler's cache): on a GPU by torch's own counters, on a CPU
by the system's count of resident memory, in a process of its own for each row (Linux only). What recorded passes of a
GPU keep for themselves is said beside it; the speed is theirs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, hardware, save_model
from training import Case, Ours, Peft

from mint.engine.device import Device

SHAPE = {"cuda": "qwen3-0.6b", "cpu": "smollm2-135m"}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
GIB = 2**30
Row = dict[str, Any]


def cases(device: str) -> list[Case]:
    if device == "cpu":
        return [
            Case("8 x 128", 8, 1, 0, [128]),
            Case("32 x 128", 32, 1, 0, [128]),
            Case("1 x 1024", 1, 1, 0, [1024]),
            Case("a group of 8, 128 + 32", 1, 8, 128, [32]),
        ]
    return [
        Case("32 x 512", 32, 1, 0, [512]),
        Case("128 x 512", 128, 1, 0, [512], peft=False),
        Case("2 x 8192", 2, 1, 0, [8192], peft=False),
        Case("groups of 8, 410 + 102", 4, 8, 410, [102], peft=False),
    ]


class GpuMemory:
    def begin(self) -> int:
        """Bytes that are held; from here on the most of them is kept in mind."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def most(self) -> int:
        return torch.cuda.max_memory_allocated()


class ProcessMemory:
    def begin(self) -> int:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        return self._read("VmRSS")

    def most(self) -> int:
        return self._read("VmHWM")

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def make(way: str, folder: str, device: str) -> Ours | Peft:
    if way == "peft":
        return Peft(folder, torch.device(device), DTYPE[device], 2**30)
    return Ours(folder, Device(torch.device(device), DTYPE[device], "chosen for a benchmark"), lean=way == "lean")


def seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(side: Ours | Peft, case: Case, device: str, rounds: int) -> Row:
    run = side.prepare(case.filled(SHAPES[SHAPE[device]].vocab_size))
    memory = GpuMemory() if device == "cuda" else ProcessMemory()
    before = memory.begin()
    run()
    peak = memory.most()
    took = min(seconds(run) for _ in range(rounds))
    side.finish(case)
    return {
        "case": case.name,
        "before_gib": round(before / GIB, 2),
        "training_gib": round((peak - before) / GIB, 2),
        "recordings_gib": round(side.recorded_bytes / GIB, 2),
        "tokens_per_second": round(case.tokens / took),
    }


def measure_apart(way: str, folder: str, case: Case, rounds: int) -> Row:
    """In a new process: what one keeps for its next pass would not show in that."""
    side = make(way, folder, "cpu")
    try:
        return measure(side, case, "cpu", rounds)
    finally:
        side.close()


def rows_of(way: str, folder: str, device: str, rounds: int) -> Iterator[Row]:
    wanted = [case for case in cases(device) if way != "peft" or case.peft]
    if device == "cpu":
        for case in wanted:
            with ProcessPoolExecutor(1, get_context("spawn")) as apart:
                yield apart.submit(measure_apart, way, folder, case, rounds).result()
        return
    side = make(way, folder, device)
    yield from map(partial(measure, side, device=device, rounds=rounds), wanted)
    side.close()
    del side
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--against", choices=("peft",), help="run it too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"hardware": hardware(), "shape": SHAPE[options.device], "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_model(SHAPE[options.device], Path(folder)))
        ways = ["keeping activations", "lean", *(["peft"] if options.against == "peft" else [])]
        for way in ways:
            for row in rows_of(way, path, options.device, options.rounds):
                result["rows"].append({"side": way} | row)
                print(
                    "{side:>20} {case:>24} {training_gib:7.2f} GiB more, recordings {recordings_gib:7.2f} GiB "
                    "{tokens_per_second:8} tok/s".format(**result["rows"][-1]),
                    flush=True,
                )
                if options.out:
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
