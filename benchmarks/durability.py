"""What the journal costs: the same calls and the same GRPO steps with it, without flushing, and without it.

    python benchmarks/durability.py [--out results.json]

One server in this process, its engine in a child, the bundled model. The variants take turns, so that other work on the
machine troubles all of them alike. Medians; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

import mint
from mint import types
from mint.config import ServerConfig
from mint.engine.supervised import SupervisedEngine
from mint.server import journal
from mint.server.app import create_app

PROMPTS, GROUP, TOKENS = 8, 4, 16
durable_write, durable_sync = journal.Disk.write, journal.Disk.sync


class Engine(SupervisedEngine):
    keeps_snapshots = True

    def snapshot(self, adapter: str, policy: str, folder: str | None = None) -> Any:
        return super().snapshot(adapter, policy, folder if self.keeps_snapshots else None)


def use(variant: str) -> None:
    journal.Disk.sync = durable_sync if variant == "durable" else lambda *_: None  # type: ignore[method-assign]
    journal.Disk.write = durable_write if variant != "none" else lambda _, d, data: len(data)  # type: ignore[method-assign]
    Engine.keeps_snapshots = variant != "none"


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def datum(tokens: int) -> types.Datum:
    ids = [1 + n % 250 for n in range(tokens + 1)]
    inputs = {"target_tokens": ids[1:], "logprobs": [-1.0] * tokens, "advantages": [0.1] * tokens}
    return types.Datum(types.ModelInput.from_ints(ids[:-1]), inputs)


def first_token(training: mint.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    sampler.sample(types.ModelInput.from_ints([1, 2, 3, 4]), 1, types.SamplingParams(max_tokens=1)).result()


def grpo_step(training: mint.TrainingClient) -> None:
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=TOKENS, temperature=1.0)
    prompts = [types.ModelInput.from_ints([1 + n, 2, 3, 4]) for n in range(PROMPTS)]
    for sample in [sampler.sample(prompt, GROUP, params) for prompt in prompts]:
        sample.result()
    passed = training.forward_backward([datum(TOKENS + 4)] * (PROMPTS * GROUP), "importance_sampling")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-5))
    passed.result()
    stepped.result()


def measure(training: mint.TrainingClient, rounds: int) -> dict[str, dict[str, float]]:
    adam = types.AdamParams(learning_rate=1e-5)
    calls: dict[str, Callable[[], Any]] = {
        "optim_step": lambda: training.optim_step(adam).result(),
        "forward_backward, 1 datum of 32 tokens": lambda: training.forward_backward([datum(32)], "ppo").result(),
        "forward_backward, 16 datums of 256 tokens": lambda: training.forward_backward(
            [datum(256)] * 16, "ppo"
        ).result(),
        "snapshot and its first token": lambda: first_token(training),
        "GRPO step": lambda: grpo_step(training),
    }
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        many = rounds if name not in ("forward_backward, 16 datums of 256 tokens", "GRPO step") else max(5, rounds // 3)
        took: dict[str, list[float]] = {"none": [], "unflushed": [], "durable": []}
        for _ in range(many):
            for variant in random.sample(sorted(took), len(took)):
                use(variant)
                took[variant].append(timed(call))
        found[name] = {variant: round(statistics.median(times), 2) for variant, times in took.items()}
    use("durable")
    return found


def flush_ms(folder: Path) -> float:
    with (folder / "probe").open("wb") as file:
        return statistics.median(
            timed(lambda: (file.write(bytes(4096)), file.flush(), os.fdatasync(file.fileno()))) for _ in range(50)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # /tmp may not be a disk
        engine = Engine(["mint/tiny"])
        config = ServerConfig(models=("mint/tiny",), port=1, data=Path(folder))
        server = uvicorn.Server(uvicorn.Config(create_app(config, engine), port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        training = mint.ServiceClient(base_url=address).create_lora_training_client("mint/tiny", rank=16)
        grpo_step(training)
        found = {
            "milliseconds": measure(training, options.rounds),
            "flush_of_4_KiB_ms": round(flush_ms(Path(folder)), 2),
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
        }
        server.should_exit = True
        thread.join()
        engine.close()
    for name, times in found["milliseconds"].items():
        print(f"{name:>44}  " + "  ".join(f"{variant} {ms:8.2f} ms" for variant, ms in times.items()))
    line = json.dumps(found)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
