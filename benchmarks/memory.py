"""Peak GPU memory of training, and what it costs in speed: the engine, lean and not, beside transformers + PEFT.

    python benchmarks/memory.py [--against peft] [--out benchmarks/results/memory_h200.json]

Qwen3-0.6B's shape, rank 16 on every linear of attention and MLP, one forward and backward pass over the batch. What
training takes is the most torch had allocated in the first pass, which is not recorded, less what it had before:
weights, and for the engine the sampler's cache, which takes a share of what is free. What recorded passes keep for
themselves is said beside it; the speed is theirs. Needs a CUDA device; a CPU has no such counter. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, hardware, save_model
from training import Case, Ours, Peft, seconds

from mint.engine.device import Device

SHAPE = "qwen3-0.6b"
GIB = 2**30


def cases() -> list[Case]:
    return [
        Case("32 x 512", 32, 1, 0, [512]),
        Case("128 x 512", 128, 1, 0, [512], peft=False),
        Case("2 x 8192", 2, 1, 0, [8192], peft=False),
        Case("groups of 8, 410 + 102", 4, 8, 410, [102], peft=False),
    ]


def measure(side: Any, case: Case, rounds: int) -> dict[str, Any]:
    run = side.prepare(case)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak = torch.cuda.max_memory_allocated()
    took = min(seconds(run) for _ in range(rounds))
    side.finish(case)
    return {
        "case": case.name,
        "before_gib": round(before / GIB, 2),
        "training_gib": round((peak - before) / GIB, 2),
        "recordings_gib": round(side.recorded_bytes / GIB, 2),
        "tokens_per_second": round(case.tokens / took),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=("peft",), help="run it too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark reads a GPU's memory counters, and there is no CUDA device here.")
    result: dict[str, Any] = {"hardware": hardware(), "shape": SHAPE, "rows": []}
    rows = result["rows"]
    device = Device(torch.device("cuda"), torch.bfloat16, "chosen for a benchmark")
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_model(SHAPE, Path(folder)))
        ways = {
            "keeping activations": lambda: Ours(path, device),
            "lean": lambda: Ours(path, device, lean=True),
        }
        if options.against == "peft":
            ways["peft"] = lambda: Peft(path, device.torch_device, device.dtype, 2**30)
        for name, make in ways.items():
            side = make()
            for case in cases():
                if name == "peft" and not case.peft:
                    continue
                rows.append({"side": name} | measure(side, case.filled(SHAPES[SHAPE].vocab_size), options.rounds))
                print(
                    "{side:>20} {case:>24} {training_gib:7.2f} GiB more, recordings {recordings_gib:7.2f} GiB "
                    "{tokens_per_second:8} tok/s".format(**rows[-1]),
                    flush=True,
                )
                if options.out:
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
            side.close()
            del side
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
