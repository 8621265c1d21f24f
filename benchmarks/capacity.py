"""What it costs to serve more adapters than fit: the same work where all fit, and where a few do.

    python benchmarks/capacity.py [--clients 20] [--fit 4] [--rounds 3] [--out benchmarks/results/capacity.json]

Every client trains a step, takes a snapshot and samples from it, in turn, so that with `--fit` below the number of
clients nearly every call has to bring its adapter back from disk: the worst case. Results must be equal to the last
bit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mint.engine.engine import Engine
from mint.engine.residence import Room
from mint.types import AdamParams, Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams

RANKS = (1, 2, 4, 8, 16, 32, 64)


def work(engine: Engine, clients: int, rounds: int) -> tuple[float, list[Any]]:
    """Seconds for all rounds, and what came out of them."""
    for n in range(clients):
        engine.create_adapter(f"c{n}", "mint/tiny", LoraConfig(rank=RANKS[n % len(RANKS)], seed=n)).result()
    told: list[Any] = []
    started = time.perf_counter()
    for r in range(rounds):
        futures: list[Any] = []
        for n in range(clients):
            tokens = [(7 * n + 5 * r + 3 * i) % 250 for i in range(24)]
            data = [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * 23})]
            futures.append(engine.forward_backward(f"c{n}", data, "cross_entropy", {}))
            engine.optim_step(f"c{n}", AdamParams(learning_rate=1e-3))
            engine.snapshot(f"c{n}", f"p{n}")
            params = SamplingParams(max_tokens=8, seed=n, stop=[])
            futures.append(engine.sample(f"p{n}", SampleRequest(ModelInput.from_ints(tokens[:8]), params, 2)))
        for future in futures:
            result = future.result()
            told.append(result.metrics["loss:sum"] if hasattr(result, "metrics") else _samples(result))
    return time.perf_counter() - started, told


def _samples(response: Any) -> list[Any]:
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--fit", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "clients": asked.clients,
        "fit": asked.fit,
        "rounds": asked.rounds,
    }
    outcomes = []
    for name, room in (("all_fit", Room()), ("few_fit", asked.fit)):
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(["mint/tiny"], room=room, spill=Path(folder))
            seconds, told = work(engine, asked.clients, asked.rounds)
            stats = engine.stats().result()
            engine.close()
        outcomes.append(told)
        result[name] = {
            "seconds": round(seconds, 2),
            "returns": int(stats["adapter_returns"]),
            "evictions": int(stats["adapter_evictions"]),
        }
        print(f"{name:10} {result[name]}")
    extra = result["few_fit"]["seconds"] - result["all_fit"]["seconds"]
    result["slowdown"] = round(result["few_fit"]["seconds"] / result["all_fit"]["seconds"], 2)
    result["ms_a_return"] = round(1000 * extra / max(1, result["few_fit"]["returns"]), 2)
    result["equal_to_the_bit"] = outcomes[0] == outcomes[1]
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
