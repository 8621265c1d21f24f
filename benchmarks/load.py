"""Two hundred clients at once, sampling and training tiny adapters: errors, memory over time, shares, latencies.

    python benchmarks/load.py --minutes 10 [--clients 200] [--max-adapters 64] [--out benchmarks/results/load.json]

Each client is a user with a session of its own: it samples from its policy, takes a training step on what it sampled,
takes a snapshot, and begins again, without a pause. Memory is what server and engine have resident; whether it is flat
is told by the mean of the last quarter of the run over that of the third, when queues and caches have long been full.
`python benchmarks/reliability_page.py` makes docs/reliability.md of the result. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving import Serving

import mint
from mint import types

PROMPT = "Q: What is 47 + 38?\nA:"
RANKS = (1, 2, 4, 8, 16, 32)
LOOK_EVERY = 2.0


@dataclass
class Tally:
    """What one client got."""

    rounds: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"sample": [], "train": [], "snapshot": []})
    errors: Counter[str] = field(default_factory=Counter)


async def client(service: mint.ServiceClient, number: int, end: float, tally: Tally) -> None:
    try:
        trainer = await service.create_lora_training_client_async("mint/tiny", rank=RANKS[number % len(RANKS)])
        tokens = trainer.get_tokenizer().encode(PROMPT)
        sampler = await trainer.save_weights_and_get_sampling_client_async()
        while time.monotonic() < end:
            sampler = await _round(trainer, sampler, tokens, number, tally)
            tally.rounds += 1
    except Exception as error:
        tally.errors[f"{type(error).__name__}: {str(error)[:200]}"] += 1


async def _round(trainer: Any, sampler: Any, tokens: list[int], number: int, tally: Tally) -> Any:
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=number)
    started = time.monotonic()
    answer = await sampler.sample_async(types.ModelInput.from_ints(tokens), 2, params)
    tally.seconds["sample"].append(time.monotonic() - started)
    data = [_datum(tokens, sequence.tokens) for sequence in answer.sequences]
    started = time.monotonic()
    passed = await trainer.forward_backward_async(data, "cross_entropy")
    stepped = await trainer.optim_step_async(types.AdamParams(learning_rate=1e-4))
    await passed.result_async()
    await stepped.result_async()
    tally.seconds["train"].append(time.monotonic() - started)
    started = time.monotonic()
    sampler = await trainer.save_weights_and_get_sampling_client_async()
    tally.seconds["snapshot"].append(time.monotonic() - started)
    return sampler


def _datum(prompt: list[int], answer: list[int]) -> types.Datum:
    whole = [*prompt, *answer]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(types.ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:], "weights": weights})


async def watch(server: Serving, looks: list[dict[str, Any]], started: float) -> None:
    while True:
        try:
            told = await asyncio.to_thread(server.status)
        except Exception as error:
            looks.append({"seconds": round(time.monotonic() - started, 1), "error": str(error)})
        else:
            looks.append(
                {
                    "seconds": round(time.monotonic() - started, 1),
                    "server_bytes": told["memory"]["server_bytes"],
                    "engine_bytes": told["memory"]["engine_bytes"],
                    "requests": told["queue"]["requests"],
                    "samples": told["queue"]["samples"],
                    "results": told["queue"]["results"],
                    "adapters": {tier: there["count"] for tier, there in told["adapters"].items()},
                    "restarts": told["engine"]["restarts"],
                    "tokens_sampled": told["engine"].get("tokens_sampled", 0),
                    "tokens_trained": told["engine"].get("tokens_trained", 0),
                }
            )
        await asyncio.sleep(LOOK_EVERY)


async def run(server: Serving, clients: int, minutes: float) -> dict[str, Any]:
    started = time.monotonic()
    end = started + 60 * minutes
    tallies = [Tally() for _ in range(clients)]
    looks: list[dict[str, Any]] = []
    watching = asyncio.create_task(watch(server, looks, started))
    services = [mint.ServiceClient(base_url=server.url, api_key="tml-load") for _ in range(clients)]
    await asyncio.gather(*(client(services[n], n, end, tallies[n]) for n in range(clients)))
    watching.cancel()
    seconds = time.monotonic() - started
    return report(tallies, looks, clients, minutes, seconds)


def report(
    tallies: list[Tally], looks: list[dict[str, Any]], clients: int, minutes: float, seconds: float
) -> dict[str, Any]:
    rounds = sorted(tally.rounds for tally in tallies)
    seen = [look for look in looks if "error" not in look]
    return {
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "clients": clients,
        "minutes": minutes,
        "seconds": round(seconds, 1),
        "errors": dict(sum((tally.errors for tally in tallies), Counter())),
        "engine_restarts": max((look["restarts"] for look in seen), default=None),
        "rounds": sum(rounds),
        "rounds_of_a_client": {
            "least": rounds[0],
            "median": statistics.median(rounds),
            "most": rounds[-1],
            "jain_index": round(sum(rounds) ** 2 / max(1e-9, len(rounds) * sum(r * r for r in rounds)), 4),
        },
        "seconds_of_a_call": {kind: _spread(tallies, kind) for kind in ("sample", "train", "snapshot")},
        "tokens_sampled": seen[-1]["tokens_sampled"] if seen else 0,
        "tokens_trained": seen[-1]["tokens_trained"] if seen else 0,
        "memory": {name: _growth(seen, f"{name}_bytes") for name in ("server", "engine")},
        "looks_failed": len(looks) - len(seen),
        "looks": seen,
    }


def _spread(tallies: list[Tally], kind: str) -> dict[str, float]:
    times = sorted(seconds for tally in tallies for seconds in tally.seconds[kind])
    if not times:
        return {}
    at = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: round(times[int(share * (len(times) - 1))], 3) for name, share in at.items()} | {
        "most": round(times[-1], 3)
    }


def _growth(looks: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Means of the third and the last quarter of the run, in MiB, and how much the last is above the third."""
    values = [look[name] / 2**20 for look in looks if look[name]]
    if len(values) < 8:
        return {}
    quarter = len(values) // 4
    third, last = statistics.mean(values[2 * quarter : 3 * quarter]), statistics.mean(values[3 * quarter :])
    return {
        "start_mib": round(values[0], 1),
        "third_quarter_mib": round(third, 1),
        "last_quarter_mib": round(last, 1),
        "growth_percent": round(100 * (last / third - 1), 2),
        "most_mib": round(max(values), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--max-adapters", type=int, default=64, help="on the device at once")
    parser.add_argument("--out", type=Path, help="also write the result here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with Serving(Path(folder), "--max-adapters", str(asked.max_adapters)) as server:
            result = asyncio.run(run(server, asked.clients, asked.minutes)) | {"max_adapters": asked.max_adapters}
        lines = server.log.read_text(errors="replace").splitlines()
        result["server_errors"] = [line for line in lines if '"level": "error"' in line or "Traceback" in line][:10]
    for name, value in result.items():
        if name != "looks":
            print(f"{name:20} {value}")
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "looks"}))


if __name__ == "__main__":
    main()
