"""What client, wire and server add to the engine's own work, and how a server behaves under one and two clients.

    python benchmarks/server.py [--against URL --model NAME] [--calls 100] [--out FILE]

- calls: milliseconds of a sample of one token, a forward_backward of one short datum and an optim_step, through client
  and server, beside the same calls made straight to an engine process; the difference is what the path adds.
- step: milliseconds of one GRPO step (8 prompts x 4 x 16 tokens) by the clock, both ways, by turns.
- larger_step: the same of 16 prompts x 8 x 64 tokens, which is still a small one.
- work: processor milliseconds of client, server and engine for such a step, which a busy machine does not change much.
- crowd: a thousand samples asked for at once by one client.
- tenants: two clients stepping at once, over one alone.
- cold: seconds from nothing to the first training client, then to the first sample, each in a fresh process.
With --against, "calls", "crowd" and "tenants" are also measured on that server, through the same client.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from grpo_step import LEARNING_RATE, RANK, Work, datums_of, mint_step
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, hardware, save_model

import mint
from mint import local, types
from mint.checks import check_loss
from mint.engine.process import EngineProcess

PROMPT = list(range(10, 26))
ONE_TOKEN = types.SamplingParams(max_tokens=1, temperature=1.0, stop=[])
DATUM = types.Datum(
    types.ModelInput.from_ints(PROMPT[:-1]), {"target_tokens": PROMPT[1:], "weights": [1.0] * (len(PROMPT) - 1)}
)
ADAM = types.AdamParams(learning_rate=1e-6)
CROWD = 1000
COLD = """
import time
began = time.perf_counter()
import sys, mint
from mint import types
trainer = mint.ServiceClient().create_lora_training_client(base_model=sys.argv[1], rank=16, seed=0)
trained = time.perf_counter()
sampler = trainer.save_weights_and_get_sampling_client()
params = types.SamplingParams(max_tokens=16, temperature=1.0, stop=[])
sampler.sample(types.ModelInput.from_ints(list(range(10, 26))), 4, params).result()
print(trained - began, time.perf_counter() - trained)
"""


def median_milliseconds(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def calls_of_client(service: mint.ServiceClient, model: str) -> dict[str, Callable[[], object]]:
    trainer = service.create_lora_training_client(base_model=model, rank=16, seed=0)
    sampler = trainer.save_weights_and_get_sampling_client()

    def step() -> None:
        trainer.forward_backward([DATUM], "cross_entropy")
        trainer.optim_step(ADAM).result()

    return {
        "sample": lambda: sampler.sample(types.ModelInput.from_ints(PROMPT), 1, ONE_TOKEN).result(),
        "forward_backward": lambda: trainer.forward_backward([DATUM], "cross_entropy").result(),
        "optim_step": lambda: trainer.optim_step(ADAM).result(),  # the first has a gradient, the others are no-ops
        "both": step,
    }


def calls_of_engine(engine: EngineProcess, model: str) -> dict[str, Callable[[], object]]:
    engine.create_adapter("a", model, types.LoraConfig(rank=16, seed=0)).result()
    engine.snapshot("a", "p").result()
    request = types.SampleRequest(types.ModelInput.from_ints(PROMPT), ONE_TOKEN, 1)

    def step() -> None:
        engine.forward_backward("a", [DATUM], "cross_entropy", {})
        engine.optim_step("a", ADAM).result()

    return {
        "sample": lambda: engine.sample("p", request).result(),
        "forward_backward": lambda: engine.forward_backward("a", [DATUM], "cross_entropy", {}).result(),
        "optim_step": lambda: engine.optim_step("a", ADAM).result(),
        "both": step,
    }


def calls(model: str, count: int, others: dict[str, tuple[mint.ServiceClient, str]]) -> dict[str, Any]:
    engine = EngineProcess([model])
    sides = {"engine": calls_of_engine(engine, model), "mint": calls_of_client(mint.ServiceClient(), model)}
    sides |= {name: calls_of_client(*other) for name, other in others.items()}
    found: dict[str, Any] = {}
    for name in sides["mint"]:
        for of in sides.values():
            median_milliseconds(of[name], 5)  # the first are slower
        times = {side: median_milliseconds(of[name], count) for side, of in sides.items()}
        found[name] = times | {"added": times["mint"] - times["engine"]}
    engine.close()
    return found


def engine_step(engine: EngineProcess, work: Work, folder: Path) -> Callable[[int], None]:
    """`mint_step`, straight to the engine's process; snapshots are kept on disk, as a server's are, and are not waited
    for here either."""
    engine.create_adapter("g", str(work.folder), types.LoraConfig(rank=RANK, seed=0)).result()
    params = types.SamplingParams(max_tokens=work.tokens, temperature=1.0, stop=[])
    options = check_loss("importance_sampling")

    def step(number: int) -> None:
        policy = f"g{number}"
        engine.snapshot("g", policy, str(folder / policy))
        prompts = work.prompt_tokens(number)
        requests = [types.SampleRequest(types.ModelInput.from_ints(prompt), params, work.group) for prompt in prompts]
        futures = [engine.sample(policy, request) for request in requests]
        data = [d for p, f in zip(prompts, futures, strict=True) for d in datums_of(p, f.result().sequences)]
        engine.forward_backward("g", data, "importance_sampling", options)
        engine.optim_step("g", types.AdamParams(learning_rate=LEARNING_RATE)).result()
        engine.release(policy)

    return step


def both_steps(work: Work, steps: int = 60) -> dict[str, float]:
    engine = EngineProcess([str(work.folder)])
    times: dict[str, list[float]] = {"engine": [], "mint": []}
    with tempfile.TemporaryDirectory() as snapshots:
        sides = {"engine": engine_step(engine, work, Path(snapshots)), "mint": mint_step(work)}
        for number in range(steps + 3):
            for side, step in sides.items():
                began = time.perf_counter()
                step(number)
                times[side].append(1000 * (time.perf_counter() - began))
        engine.close()
    found = {side: statistics.median(took[3:]) for side, took in times.items()}  # the first are slower
    return found | {"added": found["mint"] - found["engine"], "added_share": found["mint"] / found["engine"] - 1}


def work_of_a_step(work: Work, steps: int = 20) -> dict[str, float]:
    step = mint_step(work)
    for number in range(3):
        step(number)
    processes = {"client": os.getpid()} | dict(zip(("server", "engine"), _tree(local.local_server().pid), strict=True))
    before = {name: _processor_seconds(pid) for name, pid in processes.items()}
    for number in range(steps):
        step(number)
    spent = {name: 1000 * (_processor_seconds(pid) - before[name]) / steps for name, pid in processes.items()}
    return spent | {"path_share": (spent["client"] + spent["server"]) / sum(spent.values())}


def _tree(pid: int) -> list[int]:
    children = [int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]
    return [pid, *(grandchild for child in children for grandchild in _tree(child))]


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def crowd(service: mint.ServiceClient, model: str) -> float:
    sampler = service.create_sampling_client(base_model=model)
    params = types.SamplingParams(max_tokens=4, temperature=1.0, stop=[])
    began = time.perf_counter()
    futures = [sampler.sample(types.ModelInput.from_ints([*PROMPT, n]), 1, params) for n in range(CROWD)]
    for future in futures:
        future.result()
    return time.perf_counter() - began


def tenants(service: mint.ServiceClient, work: Work, model: str, steps: int = 10) -> dict[str, float]:
    first, second = (mint_step(work, service, model) for _ in range(2))

    def run(step: Callable[[int], None]) -> None:
        for number in range(steps):
            step(number)

    run(first), run(second)
    began = time.perf_counter()
    run(first)
    alone = time.perf_counter() - began
    threads = [threading.Thread(target=run, args=(step,)) for step in (first, second)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = time.perf_counter() - began
    return {"alone": alone / steps, "together": together / steps, "ratio": together / alone}


def cold(model: str, times: int = 3) -> dict[str, float]:
    runs = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as home:
            asked = [sys.executable, "-c", COLD, model]
            told = subprocess.run(asked, env=os.environ | {"MINT_HOME": home}, capture_output=True, check=True)
            runs.append([float(text) for text in told.stdout.split()])
    client, sample = (statistics.median(column) for column in zip(*runs, strict=True))
    return {"client": client, "sample": sample, "in_all": client + sample}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="URL", help="another Tinker-compatible server; its key is MINT_API_KEY")
    parser.add_argument("--model", help="the base model's name on that server")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if bool(asked.against) != bool(asked.model):
        parser.error("--against and --model go together")
    facts = hardware()
    torch.set_num_threads(1)
    others = {}
    if asked.against:
        others[asked.against] = (mint.ServiceClient(base_url=asked.against), asked.model)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINT_HOME"] = str(Path(folder) / "home")
        model = str(save_model("small", Path(folder) / "model"))
        work = Work(Path(model), SHAPES["small"].vocab_size, 8, 4, 16)
        sides = {"mint": (mint.ServiceClient(), model)} | others
        result: dict[str, Any] = {
            "benchmark": "server",
            "hardware": facts,
            "calls": calls(model, asked.calls, others),
            "step": both_steps(work),
            "larger_step": both_steps(replace(work, prompts=16, group=8, tokens=64), steps=16),
            "work": work_of_a_step(work),
            "crowd": {side: crowd(*where) for side, where in sides.items()},
            "tenants": {side: tenants(service, work, name) for side, (service, name) in sides.items()},
            "cold": cold(model),
        }
    show(result)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table("call, ms", *next(iter(result["calls"].values())))
    for name, times in result["calls"].items():
        table.add_row(name, *(f"{value:.2f}" for value in times.values()))
    console.print(table)
    for section in ("step", "larger_step", "work", "crowd", "tenants", "cold"):
        console.print(section, {k: round(v, 3) if isinstance(v, float) else v for k, v in result[section].items()})


if __name__ == "__main__":
    main()
