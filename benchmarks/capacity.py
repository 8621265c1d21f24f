"""What it costs to serve more adapters than fit: the same work where all fit, and where a few do.

    python benchmarks/capacity.py [--clients 20] [--fit 4] [--rounds 7] [--out benchmarks/results/capacity.json]

Every client trains a step, takes a snapshot and samples from it, in turn, so that with `--fit` below the number of
clients nearly every call has to bring its adapter back from disk: the worst case. The two engines take their rounds by
turns, the first round of each is not counted, and medians are told, so that other work on the machine meets both alike.
Results must be equal to the last bit. Takes about a minute on two cores. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mint.engine.engine import Engine
from mint.engine.holdings import Room
from mint.types import AdamParams, Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams

RANKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Served:
    """An engine, and what its rounds took and told."""

    engine: Engine
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)

    def begin(self, clients: int) -> None:
        for n in range(clients):
            lora = LoraConfig(rank=RANKS[n % len(RANKS)], seed=n)
            self.engine.create_adapter(f"c{n}", "mint/tiny", lora).result()

    def round(self, clients: int, number: int) -> None:
        began, worked = time.perf_counter(), time.process_time()
        futures = [future for n in range(clients) for future in self._turn(n, number)]
        for future in futures:
            result = future.result()
            self.told.append(result.metrics["loss:sum"] if hasattr(result, "metrics") else _samples(result))
        self.seconds.append(time.perf_counter() - began)
        self.processor_seconds.append(time.process_time() - worked)

    def _turn(self, client: int, number: int) -> list[Any]:
        tokens = [(7 * client + 5 * number + 3 * i) % 90 for i in range(24)]
        data = [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * 23})]
        trained = self.engine.forward_backward(f"c{client}", data, "cross_entropy", {})
        self.engine.optim_step(f"c{client}", AdamParams(learning_rate=1e-3))
        self.engine.snapshot(f"c{client}", f"p{client}")
        params = SamplingParams(max_tokens=8, seed=client, stop=[])
        request = SampleRequest(ModelInput.from_ints(tokens[:8]), params, 2)
        return [trained, self.engine.sample(f"p{client}", request)]

    def figures(self) -> dict[str, Any]:
        stats = self.engine.stats().result()
        return {
            "round_seconds": round(statistics.median(self.seconds[1:]), 3),
            "round_processor_seconds": round(statistics.median(self.processor_seconds[1:]), 3),
            "returns": int(stats["adapter_returns"]),
            "evictions": int(stats["adapter_evictions"]),
        }


def _samples(response: Any) -> list[Any]:
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]


def measure(clients: int, fit: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rooms = {"all_fit": Room(), "few_fit": fit}
        served = {
            name: Served(Engine(["mint/tiny"], room=room, spill=Path(folder) / name)) for name, room in rooms.items()
        }
        for one in served.values():
            one.begin(clients)
        for number in range(rounds + 1):
            for one in served.values():
                one.round(clients, number)
        figures = {name: one.figures() for name, one in served.items()}
        for one in served.values():
            one.engine.close()
    few, everything = figures["few_fit"], figures["all_fit"]
    extra = {kind: few[kind] - everything[kind] for kind in ("round_seconds", "round_processor_seconds")}
    returns_a_round = few["returns"] / (rounds + 1)
    return figures | {
        "slowdown": round(few["round_seconds"] / everything["round_seconds"], 2),
        "ms_a_return": round(1000 * extra["round_seconds"] / max(1.0, returns_a_round), 2),
        "processor_ms_a_return": round(1000 * extra["round_processor_seconds"] / max(1.0, returns_a_round), 2),
        "equal_to_the_bit": served["all_fit"].told == served["few_fit"].told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--fit", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "clients": asked.clients,
        "fit": asked.fit,
        "rounds": asked.rounds,
    }
    result |= measure(asked.clients, asked.fit, asked.rounds)
    for name, value in result.items():
        print(f"{name:22} {value}")
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
