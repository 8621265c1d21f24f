"""Training and sampling through client and server, beside transformers + PEFT in process, on a CPU.

    python benchmarks/through_server.py [--shape small] [--cases even single] [--rounds 3] [--bfloat16] [--out FILE]

Everything a user pays is in our figures: the client, the wire, the server, its journal and the engine, with the threads
the engine chooses. The peer runs in this process with one thread and with all cores, and its better figure counts. The
sides take turns; the fastest round of each counts, because a busy machine only ever makes a round slower. Both have the
same random weights and a rank-16 LoRA on every linear of attention and MLP, in float32, or with --bfloat16 in that
format: ours served so, and the peer with all of its tensors so. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sampling import Peer, prompts_of
from shapes import SHAPES, hardware, save_model
from training import RAGGED, Case, Peft

import mint
from mint import local, types
from mint.engine.device import Device


@dataclass(frozen=True)
class Sampling:
    name: str
    prompts: Sequence[int]
    samples: int
    tokens: int
    """Of an answer; none stops early."""


# The larger model makes an eighth of the work: it is a question of ratios.
WORK: dict[str, list[Case | Sampling]] = {
    "small": [
        Case("forward+backward, 32 x 128", 32, 1, 0, [128]),
        Case("forward+backward, 32 ragged, 16 to 256", 32, 1, 0, RAGGED),
        Sampling("sampling, 32 prompts x 4 x 64", [32] * 32, 4, 64),
        Sampling("sampling, 1 x 1 x 128", [32], 1, 128),
    ],
    "smollm2-135m": [
        Case("forward+backward, 8 x 128", 8, 1, 0, [128]),
        Case("forward+backward, 8 ragged, 16 to 256", 8, 1, 0, RAGGED[::4]),
        Case("forward+backward, a group of 8, 128 + 32", 1, 8, 128, [32]),
        Case("forward+backward, 1 x 1024", 1, 1, 0, [1024]),
        Sampling("sampling, 4 prompts x 4 x 16", [32] * 4, 4, 16),
        Sampling("sampling, 1 x 4 x 32", [32], 4, 32),
        Sampling("sampling, 1 x 1 x 32", [32], 1, 32),
        Sampling("sampling, 8 ragged prompts x 2 x 16", [8, 16, 24, 48, 64, 96, 128, 160], 2, 16),
    ],
    "gemma3-270m": [
        Case("forward+backward, 4 x 128", 4, 1, 0, [128]),
        Sampling("sampling, 4 prompts x 4 x 16", [32] * 4, 4, 16),
        Sampling("sampling, 1 x 1 x 32", [32], 1, 32),
    ],
}


class Ours:
    """A local server with the model, through the client."""

    def __init__(self, service: mint.ServiceClient, folder: str, vocab: int) -> None:
        self._vocab = vocab
        self._trainer = service.create_lora_training_client(base_model=folder, rank=16, seed=0, train_unembed=False)
        self._policy = self._trainer.save_weights_and_get_sampling_client()

    def prepare(self, work: Case | Sampling) -> Callable[[], None]:
        if isinstance(work, Case):
            return lambda: self._train(work)
        rng = np.random.default_rng(0)
        return lambda: self._sample(work, prompts_of(rng, list(work.prompts), self._vocab))

    def _train(self, work: Case) -> None:
        self._trainer.forward_backward(work.data, "importance_sampling").result()

    def _sample(self, work: Sampling, prompts: list[list[int]]) -> None:
        params = types.SamplingParams(max_tokens=work.tokens, temperature=1.0, stop=[])
        asked = [self._policy.sample(types.ModelInput.from_ints(prompt), work.samples, params) for prompt in prompts]
        for answer in asked:
            answer.result()


class Theirs:
    def __init__(self, folder: str, vocab: int, threads: int, dtype: torch.dtype) -> None:
        self._folder, self._vocab, self._threads = folder, vocab, threads
        self._device = Device(torch.device("cpu"), dtype, "chosen for a benchmark")

    def prepare(self, work: Case | Sampling) -> Callable[[], None]:
        if isinstance(work, Case):
            run = Peft(self._folder, self._device.torch_device, self._device.dtype, len(work.data)).prepare(work)
        else:
            peer, rng = Peer(self._folder, self._device, self._threads), np.random.default_rng(0)

            def run() -> None:
                peer.sample(prompts_of(rng, list(work.prompts), self._vocab), work.samples, work.tokens)

        def threaded() -> None:
            torch.set_num_threads(self._threads)
            run()

        return threaded


def serve(data: Path, bfloat16: bool) -> mint.ServiceClient:
    flags = ["--port", "0", "--data", str(data), "--local", *(["--bfloat16"] if bfloat16 else [])]
    address = local.LocalServer([*local.COMMAND, *flags], data).wait_until_ready()
    return mint.ServiceClient(base_url=address.base_url, api_key=address.api_key)


def tokens_of(work: Case | Sampling) -> int:
    return work.tokens if isinstance(work, Case) else len(work.prompts) * work.samples * work.tokens


def measure(work: Case | Sampling, sides: dict[str, Ours | Theirs], rounds: int) -> dict[str, Any]:
    runs = {name: side.prepare(work) for name, side in sides.items()}
    for run in runs.values():
        run()
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            took[name].append(time.perf_counter() - began)
    best = {name: min(times) for name, times in took.items()}
    peer = min(seconds for name, seconds in best.items() if name != "mint")
    speeds = {name: round(tokens_of(work) / seconds, 1) for name, seconds in best.items()}
    ratio = round(peer / best["mint"], 2)
    return {"case": work.name, "tokens": tokens_of(work), "tokens_per_second": speeds, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(WORK), nargs="+", default=list(WORK))
    parser.add_argument("--cases", nargs="+", help="only cases whose names contain one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    dtype = torch.bfloat16 if asked.bfloat16 else torch.float32
    result: dict[str, Any] = {"benchmark": "through_server", "hardware": hardware(), "rows": []}
    threads = sorted({1, result["hardware"]["cores"]})
    with tempfile.TemporaryDirectory() as folder:
        service = serve(Path(folder) / "home", asked.bfloat16)
        for shape in asked.shape:
            model, vocab = str(save_model(shape, Path(folder) / shape)), SHAPES[shape].vocab_size
            sides: dict[str, Ours | Theirs] = {"mint": Ours(service, model, vocab)}
            sides |= {f"transformers + PEFT, threads: {n}": Theirs(model, vocab, n, dtype) for n in threads}
            for work in WORK[shape]:
                if asked.cases and not any(part in work.name for part in asked.cases):
                    continue
                filled = work.filled(vocab) if isinstance(work, Case) else work
                result["rows"].append({"shape": shape} | measure(filled, sides, asked.rounds))
                print(json.dumps(result["rows"][-1]), flush=True)
                if asked.out:  # as it grows, so that an interrupted run is not lost
                    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    table = Table("shape", "case", *sides, "ratio", title="tokens a second")
    for row in result["rows"]:
        speeds = (f"{speed:,.0f}" for speed in row["tokens_per_second"].values())
        table.add_row(row["shape"], row["case"], *speeds, f"{row['ratio']:.2f}")
    Console().print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
