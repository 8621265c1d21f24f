"""Tokens a second of the sampler, beside transformers `generate` with PEFT, and how the cost grows.

    python benchmarks/sampling.py [--device cuda] [--against transformers] [--shape small] [--sweep] [--out FILE]

Every case runs on both sides in turn, several rounds, each with new prompts; the best round of each side is kept,
because a busy machine only ever makes a round slower. The clock starts when the prompts are there (of ours: the
requests, which a client makes). Both have the same random weights and a rank-16 LoRA on every linear of the layers
(ours on the unembedding as well). On the CPU ours uses the cores there are, or OMP_NUM_THREADS of them; the peer runs
with one thread and with as many, and its better figure counts. With `--device cuda` the peer runs one round, and there
are also: draws with filters, the deterministic mode, how far the sampler's log-probs are from the trainer's, and how
long it takes from an optimizer step until the new policy can be sampled. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, hardware, save_model
from transformers import AutoModelForCausalLM

from mint.engine.device import Device, cores
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.optimizer import AdamW
from mint.engine.sampler.sampler import Sampler
from mint.engine.trainer import Trainer
from mint.engine.verify import check_copy
from mint.types import (
    AdamParams,
    Datum,
    LoraConfig,
    ModelInput,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
)

# (shape, label, prompt lengths, samples a prompt, tokens a sample)
Case = tuple[str, str, list[int], int, int]
CASES: dict[str, list[Case]] = {
    "cpu": [
        ("small", "32 prompts x 4 x 64", [32] * 32, 4, 64),
        ("small", "32 ragged prompts x 4 x 64", [*range(16, 256, 8), 16, 256], 4, 64),
        ("small", "1 x 1 x 128", [32], 1, 128),
        ("smollm2-135m", "4 prompts x 4 x 16", [32] * 4, 4, 16),
        ("smollm2-135m", "8 ragged prompts x 2 x 16", [8, 16, 24, 48, 64, 96, 128, 160], 2, 16),
    ],
    "cuda": [
        ("qwen3-0.6b", "256 x 1 x 128", [64] * 256, 1, 128),
        ("qwen3-0.6b", "32 x 8 x 128", [64] * 32, 8, 128),
        ("qwen3-0.6b", "1024 x 1 x 128", [64] * 1024, 1, 128),
        ("qwen3-0.6b", "1 x 1 x 128", [64], 1, 128),
        ("gemma3-270m", "256 x 1 x 128", [64] * 256, 1, 128),
        ("gemma3-270m", "1 x 1 x 128", [64], 1, 128),
    ],
}
# On a GPU, ours alone: how requests may differ...
FILTERS: dict[str, dict[str, Any]] = {
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
}
# ...and what the mode costs in which no sample depends on its company.
DETERMINISTIC = ("256 x 1 x 128", "1 x 1 x 128")


class Ours:
    def __init__(self, folder: str, device: Device) -> None:
        self.model = BaseModel.load(folder, device)
        self.sampler = Sampler(self.model)

    def adapter(self, rank: int = 16, seed: int = 0) -> Adapter:
        """One whose B is not zero."""
        adapter = self.model.new_adapter(LoraConfig(rank=rank, seed=seed))
        with torch.no_grad():
            for _, up in adapter.weights.values():
                up.normal_(std=0.01)
        return adapter

    def sample(self, requests: list[SampleRequest], adapters: list[Adapter]) -> list[Any]:
        answers: dict[int, SampleResponse] = {}
        for n, request in enumerate(requests):
            self.sampler.add(request, adapters[n % len(adapters)], lambda answer, n=n: answers.__setitem__(n, answer))  # type: ignore[misc]
        while self.sampler.has_work:
            self.sampler.step()
        return [answers[n] for n in range(len(requests))]


class Peer:
    """transformers `generate` of a PEFT model."""

    def __init__(self, folder: str, device: Device, threads: int) -> None:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=device.dtype).to(device.torch_device)
        self._model = get_peft_model(model, PeftConfig(r=16, lora_alpha=32, target_modules="all-linear")).eval()
        self.threads = threads
        self._device = device.torch_device

    def sample(self, prompts: list[list[int]], samples: int, tokens: int) -> None:
        if self._device.type == "cpu":
            torch.set_num_threads(self.threads)
        width = max(map(len, prompts))
        rows = [prompt for prompt in prompts for _ in range(samples)]
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self._device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self._device)
        with torch.no_grad():
            self._model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=tokens,
                min_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip


def requests_of(prompts: list[list[int]], samples: int, tokens: int, **filters: Any) -> list[SampleRequest]:
    """What a client sends."""
    params = [SamplingParams(max_tokens=tokens, seed=n, stop=[], **filters) for n in range(len(prompts))]
    return [SampleRequest(ModelInput.from_ints(p), of, samples) for p, of in zip(prompts, params, strict=True)]


def prompts_of(rng: np.random.Generator, lengths: list[int], vocabulary: int) -> list[list[int]]:
    return [rng.integers(3, vocabulary, length).tolist() for length in lengths]


def seconds(call: Callable[[], Any], device: Device) -> float:
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def compare(ours: Ours, peers: list[Peer], case: Case, device: Device, rounds: int, **filters: Any) -> dict[str, Any]:
    name, label, lengths, samples, tokens = case
    rng = np.random.default_rng(0)
    adapter = ours.adapter().snapshot(ours.model.dtype)
    vocabulary = ours.model.facts.vocab_size
    sides: list[Callable[[list[list[int]], int], Callable[[], Any]]] = [
        lambda prompts, count: partial(ours.sample, requests_of(prompts, samples, count, **filters), [adapter]),
        *(lambda prompts, count, peer=peer: partial(peer.sample, prompts, samples, count) for peer in peers),  # type: ignore[misc]
    ]
    for number, side in enumerate(sides):
        side(prompts_of(rng, lengths, vocabulary), 2 if number else min(tokens, 24))()
    rounds_of: list[list[float]] = [[] for _ in sides]
    for number in range(rounds):
        running = sides[:1] if number and device.torch_device.type == "cuda" else sides
        for side, times in zip(running, rounds_of, strict=False):
            times.append(seconds(side(prompts_of(rng, lengths, vocabulary), tokens), device))
    took = {"ours": rounds_of[0]}
    if peers:
        took["transformers_peft"] = min(rounds_of[1:], key=min)
    drawn = len(lengths) * samples * tokens
    row: dict[str, Any] = {"shape": name, "case": label, "tokens": drawn}
    for side, times in took.items():
        row[side] = {
            "tokens_per_second": drawn / min(times),
            "ms_per_step": 1e3 * min(times) / tokens,
            "seconds": times,
        }
    if peers:
        row["transformers_peft"]["threads"] = peers[rounds_of[1:].index(took["transformers_peft"])].threads
        row["ratio"] = min(took["transformers_peft"]) / min(took["ours"])
        row["ratio_of_medians"] = statistics.median(took["transformers_peft"]) / statistics.median(took["ours"])
    return row


def variants(ours: Ours, path: str, cases: list[Case], device: Device, rounds: int) -> Iterator[dict[str, Any]]:
    """Of a model's cases on a GPU, ours alone: draws with filters, then the deterministic mode."""
    first, *_ = cases
    for label, filters in FILTERS.items():
        yield compare(ours, [], first, device, rounds, **filters) | {"case": f"{first[1]}, {label}"}
    steady = replace(device, steady=True)
    deterministic = Ours(path, steady)
    for case in cases:
        if case[1] in DETERMINISTIC:
            yield compare(deterministic, [], case, steady, rounds) | {"case": f"{case[1]}, deterministic"}


def sweep(ours: Ours, device: Device, large: bool) -> Iterator[dict[str, Any]]:
    """How cost grows with the batch, the context, the adapters in a batch and their rank. Every row has a prompt of its
    own on a GPU; on a CPU, where reading so many would hide the rest, those of an adapter are samples of one."""
    rng = np.random.default_rng(1)
    base, few = (128, 32) if large else (64, 8)
    longest = 8192 if large else 8000  # the small model's context is 8,192, with what is drawn
    plans: list[tuple[str, int, int, int, int, int]] = []  # (axis, value, batch, context, adapters, rank)
    plans += [("batch", n, n, 128, 1, 16) for n in (1, 4, 16, 64, 256, 1024)]
    plans += [("context", n, few, n, 1, 16) for n in (128, 512, 2048, longest)]
    plans += [("adapters", n, base, 128, n, 16) for n in (1, 4, 16, 64)]
    plans += [("rank", n, base, 128, 1, n) for n in (1, 8, 16, 64, 128)]
    measured: dict[tuple[int, ...], dict[str, float]] = {}
    for axis, value, *plan in plans:
        if tuple(plan) not in measured:
            measured[tuple(plan)] = _point(ours, device, rng, large, *plan)
        batch, context, adapters, rank = plan
        row = {"axis": axis, "value": value, "batch": batch, "context": context, "adapters": adapters, "rank": rank}
        row |= measured[tuple(plan)]
        yield row
        print(
            "{axis:>9} {value:>5}: {ms_per_step:8.2f} ms a step, prompts {prompts_ms:8.1f} ms".format(**row), flush=True
        )


def _point(
    ours: Ours,
    device: Device,
    rng: np.random.Generator,
    large: bool,
    batch: int,
    context: int,
    adapters: int,
    rank: int,
) -> dict[str, float]:
    tokens, samples = (64, 1) if large else (16, batch // adapters)
    one = ours.adapter(rank)
    held = [one.snapshot(ours.model.dtype) for _ in range(adapters)]  # equal, but nobody knows
    times: dict[int, list[float]] = {1: [], tokens + 1: []}
    for number in range(4):
        for count, found in times.items():
            prompts = prompts_of(rng, [context] * (batch // samples), ours.model.facts.vocab_size)
            took = seconds(partial(ours.sample, requests_of(prompts, samples, count), held), device)
            found += [took] if number else []  # the first round warms up
    for adapter in held:
        ours.sampler.forget(adapter)
    first, all_of_it = min(times[1]), min(times[tokens + 1])
    return {"prompts_ms": 1e3 * first, "ms_per_step": 1e3 * (all_of_it - first) / tokens}


def agreement(ours: Ours) -> dict[str, float]:
    """Sampler against trainer over fresh samples of one policy."""
    model, rng = ours.model, np.random.default_rng(2)
    policy = ours.adapter().snapshot(model.dtype)
    lengths = rng.integers(16, 200, 64).tolist()
    answers = ours.sample(requests_of(prompts_of(rng, lengths, model.facts.vocab_size), 2, 64), [policy])
    rng = np.random.default_rng(2)
    rng.integers(16, 200, 64)
    prompts = prompts_of(rng, lengths, model.facts.vocab_size)
    data, sampled = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        for sequence in answer.sequences:
            full = prompt + sequence.tokens
            data.append(Datum(ModelInput.from_ints(full[:-1]), {"target_tokens": TensorData(full[1:], "int64")}))
            sampled.append(np.array(sequence.logprobs))
    steps = Trainer(model).forward_backward(policy, data, "cross_entropy", {}, backward=False)
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        outputs = stop.value.loss_fn_outputs
    trained = [o["logprobs"].to_numpy()[-len(s) :] for o, s in zip(outputs, sampled, strict=True)]
    difference = np.concatenate(trained) - np.concatenate(sampled)
    gap = np.abs(difference)
    return {
        "tokens": float(gap.size), "mean": float(gap.mean()), "p99": float(np.quantile(gap, 0.99)),
        "max": float(gap.max()), "mean_ratio": float(np.exp(difference).mean()),
    }  # fmt: skip


def refresh(ours: Ours, device: Device) -> dict[str, float]:
    """From the end of an optimizer step until the sampler can draw with the new weights: the copy, its check, and
    whatever the sampler does when it first meets it."""
    adapter = ours.adapter()
    optimizer = AdamW(adapter)
    one_token = requests_of([[5, 6, 7]], 1, 1)
    copies, first, known = [], [], []
    for _ in range(6):
        adapter.accumulate(torch.randn_like(adapter.values_P))
        optimizer.step(AdamParams(learning_rate=1e-5))
        held: list[Adapter] = []
        copies.append(seconds(lambda held=held: held.append(adapter.snapshot(ours.model.dtype)), device))  # type: ignore[misc]
        checked = seconds(lambda held=held: check_copy(adapter, held[0]), device)  # type: ignore[misc]
        copies[-1] += checked
        first.append(seconds(partial(ours.sample, one_token, held), device))
        known.append(seconds(partial(ours.sample, one_token, held), device))
    copy, meets = (1e3 * statistics.median(times[1:]) for times in (copies, first))
    return {
        "snapshot_ms": copy,
        "first_token_ms": meets,
        "token_of_a_known_policy_ms": 1e3 * statistics.median(known[1:]),
    }


def described(row: dict[str, Any]) -> str:
    line = f"{row['shape']:>13} {row['case']:>28}: {row['ours']['tokens_per_second']:9.0f} tok/s, "
    line += f"{row['ours']['ms_per_step']:7.2f} ms a step"
    return line + (f"; {row['ratio']:.2f} x transformers + PEFT" if "ratio" in row else "")


def keep(result: dict[str, Any], out: Path | None) -> None:
    """As it grows, so that an interrupted run is not lost."""
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--against", choices=("transformers",))
    parser.add_argument("--shape", choices=tuple(SHAPES), nargs="+", help="only cases of these")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    device = Device(torch.device(args.device), dtype, "asked for")
    result: dict[str, Any] = {"hardware": hardware(), "rows": []}
    last = ""
    cases = [case for case in CASES[args.device] if not args.shape or case[0] in args.shape]
    of_first = [case for case in cases if case[0] == cases[0][0]]
    widest = of_first[-1]
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            if case[0] != last:
                last = case[0]
                path = str(save_model(last, Path(folder) / last))
                ours = Ours(path, device)
                threads = [1] if cuda else sorted({1, cores().count})
                peers = [Peer(path, device, count) for count in threads] if args.against else []
                gc.freeze()  # as the engine's process does
            rows = iter([compare(ours, peers, case, device, args.rounds)])
            if cuda and case is widest:
                rows = chain(rows, variants(ours, path, of_first, device, args.rounds))
            for row in rows:
                result["rows"].append(row | {"threads": None if cuda else threads[-1]})
                print(described(row), flush=True)
                keep(result, args.out)
            if case is widest:
                if cuda:
                    result["agreement"], result["refresh"] = agreement(ours), refresh(ours, device)
                    print(result["agreement"], result["refresh"], flush=True)
                    keep(result, args.out)
                if args.sweep:
                    result["sweep"] = []
                    for point in sweep(ours, device, cuda):
                        result["sweep"].append(point)
                        keep(result, args.out)
    keep(result, args.out)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
