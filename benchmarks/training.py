"""Forward and backward passes a second: the engine, beside transformers + PEFT on the same data in the same run.

    python benchmarks/training.py --against peft                       # CPU: the small model, SmolLM2-135M's shape
    python benchmarks/training.py --against torch --threads 1          # CPU: beside the engine's own pass through torch
    python benchmarks/training.py --device cuda --against peft         # GPU: Qwen3-0.6B's shape
    python benchmarks/training.py --shape small --cases even ragged    # some of it

Every figure is tokens of the datums a second, so padding and sharing show. Both sides have the same adapter (rank 16 on
every linear of attention and MLP, unless a case says otherwise), the same weights and the same number of threads, and
take turns; the fastest round of each counts, after one before the clock starts (ten where there are several adapters).
PEFT's batch is padded to its longest sequence, whole unless told otherwise. With one thread the time is the
processor's, so that a busy machine matters less; otherwise it is the clock's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, hardware, save_model

from mint.columns import compact
from mint.engine import tree
from mint.engine.device import Device
from mint.engine.engine import Engine
from mint.types import Datum, LoraConfig, ModelInput

ALPHA = 32
UNTIL_RECORDED = 10
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """Groups of sequences that begin with the same prompt; a prompt of 0 tokens makes a group of any sequences."""

    name: str
    groups: int
    size: int
    prompt: int
    answers: Sequence[int]
    """Lengths, given to the sequences in turn."""
    rank: int = 16
    adapters: int = 1
    unembed: bool = False
    peft: bool = True
    """Whether PEFT runs it too."""
    shared: bool | None = None
    """False: common beginnings are computed again for each sequence."""
    data: list[Datum] = field(default_factory=list)

    def filled(self, vocab: int) -> Case:
        rng = np.random.default_rng(0)
        lengths = iter(np.resize(np.asarray(self.answers), self.groups * self.size).tolist())
        for _ in range(self.groups):
            prompt = rng.integers(0, vocab, self.prompt)
            for _ in range(self.size):
                tokens = np.concatenate([prompt, rng.integers(0, vocab, next(lengths) + 1)])
                self.data.append(_datum(tokens, max(0, self.prompt - 1)))
        return self

    @property
    def tokens(self) -> int:
        return sum(datum.model_input.length for datum in self.data)


def _datum(tokens: np.ndarray, unweighted: int) -> Datum:
    count = len(tokens) - 1
    weights = (np.arange(count) >= unweighted).astype(np.float32)
    inputs = {
        "target_tokens": tokens[1:],
        "weights": weights,
        "advantages": weights * np.where(np.arange(count) % 2, 0.5, -0.5).astype(np.float32),
        "logprobs": np.full(count, -float(np.log(4096)), np.float32),
    }
    return Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs)


RAGGED = np.linspace(16, 256, 32).astype(int).tolist()


def cases(device: str, shape: str) -> list[Case]:
    if device == "cuda":
        return [
            Case("even", 32, 1, 0, [512]),
            Case("even, unembedding too", 32, 1, 0, [512], unembed=True, peft=False),
            Case("ragged", 32, 1, 0, np.linspace(64, 1024, 32).astype(int).tolist()),
            *_prompts(512, peft=False),
            *(Case(f"batch {n}", n, 1, 0, [512], peft=False) for n in (1, 4, 16, 64, 256, 1024)),
            *(Case(f"context {n}", 16384 // n, 1, 0, [n], peft=False) for n in (128, 2048, 8192)),
            *(Case(f"adapters {n}", 64, 1, 0, [256], adapters=n, peft=False) for n in (1, 4, 16, 64)),
            *(Case(f"rank {n}", 32, 1, 0, [512], rank=n, peft=False) for n in (1, 8, 64, 128)),
        ]
    few = 1 if shape == "small" else 4
    even = Case("even", 32 // few, 1, 0, [128])
    ragged = Case("ragged", 32 // few, 1, 0, RAGGED[::few] if few > 1 else RAGGED)
    if shape != "small":
        return [
            even,
            ragged,
            Case("group", 1, 8, 128, [32]),
            Case("group, not shared", 1, 8, 128, [32], peft=False, shared=False),
        ]
    return [
        even,
        Case("even, unembedding too", 32, 1, 0, [128], unembed=True),
        ragged,
        *_prompts(256, peft=True),
        *(Case(f"batch {n}", n, 1, 0, [128]) for n in (1, 8, 128)),
        Case("batch 1024", 1024, 1, 0, [128], peft=False),
        *(Case(f"context {n}", max(1, 4096 // n), 1, 0, [n]) for n in (128, 512, 2048, 8192)),
        *(Case(f"adapters {n}", 64, 1, 0, [64], adapters=n, peft=False) for n in (1, 4, 16, 64)),
        *(Case(f"rank {n}", 32, 1, 0, [128], rank=n) for n in (1, 8, 64, 128)),
    ]


def _prompts(total: int, peft: bool) -> list[Case]:
    """Groups of 8 whose sequences are about `total` tokens long, by the ratio of prompt to answer."""
    found = []
    for ratio in (1, 4, 16):
        answer = total // (ratio + 1)
        name = f"prompt:answer {ratio}:1"
        found.append(Case(name, 4, 8, ratio * answer, [answer], peft=peft))
        found.append(Case(f"{name}, not shared", 4, 8, ratio * answer, [answer], peft=False, shared=False))
    return found


class Ours:
    def __init__(self, folder: str, device: Device | None, lean: bool = False, native: bool = True) -> None:
        """`native`: in native code, where the engine has it."""
        self._engine = Engine([folder], device, lean=lean)
        self._folder, self._native = folder, native

    def prepare(self, case: Case) -> Callable[[], None]:
        """One call for each adapter, with its share of the data, all under way at once."""
        names = [f"{case.name}/{n}" for n in range(case.adapters)]
        lora = LoraConfig(rank=case.rank, seed=0, train_unembed=case.unembed)
        for name in names:
            self._engine.create_adapter(name, self._folder, lora).result()
        if not self._native:
            for runtime in self._engine._runtimes.loaded.values():
                runtime.model.native_training = None
        shares = [compact(case.data[n :: case.adapters]) for n in range(case.adapters)]  # as the server hands them on
        shortest = 2**62 if case.shared is False else tree.SHORTEST_SHARED

        def run() -> None:
            before, tree.SHORTEST_SHARED = tree.SHORTEST_SHARED, shortest
            calls = [
                self._engine.forward_backward(name, share, "importance_sampling", {})
                for name, share in zip(names, shares, strict=True)
            ]
            for call in calls:
                call.result()
            tree.SHORTEST_SHARED = before

        return run

    def finish(self, case: Case) -> None:
        for n in range(case.adapters):
            self._engine.release(f"{case.name}/{n}").result()

    @property
    def recorded_bytes(self) -> int:
        """Memory of a GPU that recorded passes keep for themselves."""
        return sum(runtime.trainer.recorded_bytes for runtime in self._engine._runtimes.loaded.values())

    def close(self) -> None:
        self._engine.close()


class Peft:
    """As its documentation shows it: a padded batch, logits, log-softmax, backward."""

    recorded_bytes = 0

    def __init__(self, folder: str, device: torch.device, dtype: torch.dtype, sequences_at_once: int) -> None:
        self._folder, self._device, self._dtype, self._at_once = folder, device, dtype, sequences_at_once

    def prepare(self, case: Case) -> Callable[[], None]:
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self._folder, dtype=self._dtype, attn_implementation="sdpa")
        targets = [*TARGETS, "lm_head"] if case.unembed else TARGETS
        config = PeftConfig(r=case.rank, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0)
        self._model = get_peft_model(base.to(self._device), config).train()
        batches = [case.data[n : n + self._at_once] for n in range(0, len(case.data), self._at_once)]
        padded = [self._pad(batch) for batch in batches]

        def run() -> None:
            for batch in padded:
                self._pass(*batch)
            self._model.zero_grad()
            if self._device.type == "cuda":
                torch.cuda.synchronize()

        return run

    def finish(self, case: Case) -> None:
        del self._model

    def close(self) -> None:
        """Nothing outlives a case."""

    def _pad(self, data: Sequence[Datum]) -> tuple[torch.Tensor, ...]:
        longest = max(datum.model_input.length for datum in data)
        keys = ("target_tokens", "weights", "advantages", "logprobs")
        rows = [[np.asarray(d.model_input.to_ints()), *(d.loss_fn_inputs[k].to_numpy() for k in keys)] for d in data]
        columns = [np.stack([np.pad(x, (0, longest - len(x))) for x in column]) for column in zip(*rows, strict=True)]
        mask = np.stack([np.arange(longest) < d.model_input.length for d in data]).astype(np.int64)
        return tuple(torch.from_numpy(x).to(self._device) for x in (mask, *columns))

    def _pass(self, mask: Any, tokens: Any, targets: Any, weights: Any, advantages: Any, recorded: Any) -> None:
        logits = self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        p = torch.log_softmax(logits.float(), dim=-1).gather(-1, targets[..., None])[..., 0]
        (-(weights * torch.exp(p - recorded) * advantages).sum()).backward()


def seconds(run: Callable[[], None]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 and not torch.cuda.is_available() else time.perf_counter
    started = clock()
    run()
    return clock() - started


def measure(case: Case, sides: dict[str, Any], rounds: int) -> dict[str, Any]:
    runs = {name: side.prepare(case) for name, side in sides.items() if name != "peft" or case.peft}
    took: dict[str, list[float]] = {name: [] for name in runs}
    # On a GPU adapters meet in passes of some other size each time; those that come up are recorded.
    for _ in range(1 if case.adapters == 1 else UNTIL_RECORDED):
        for run in runs.values():
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            took[name].append(seconds(run))
    for name in runs:
        sides[name].finish(case)
    row: dict[str, Any] = {"case": case.name, "tokens": case.tokens}
    row |= {f"{name}_tokens_per_second": round(case.tokens / min(times)) for name, times in took.items()}
    for peer in took.keys() - {"ours"}:
        row["ratio"] = round(min(took[peer]) / min(took["ours"]), 2)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'':>36} {'tokens':>8} {'ours, tok/s':>12} {'peer, tok/s':>12} {'ratio':>6}"]
    for row in rows:
        peer = row.get("peft_tokens_per_second", row.get("torch_tokens_per_second", ""))
        lines.append(
            f"{row['shape'] + ', ' + row['case']:>36} {row['tokens']:>8} {row['ours_tokens_per_second']:>12} "
            f"{peer:>12} {row.get('ratio', ''):>6}"
        )
    return "\n".join(lines)


def run_shape(shape: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    cuda = options.device == "cuda"
    device = Device(torch.device(options.device), torch.bfloat16 if cuda else torch.float32, "chosen for a benchmark")
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_model(shape, Path(folder)))
        sides: dict[str, Any] = {"ours": Ours(path, device)}
        if options.against == "peft":
            sides["peft"] = Peft(path, device.torch_device, device.dtype, options.peft_sequences)
        elif options.against == "torch":
            sides["torch"] = Ours(path, device, native=False)
        for case in cases(options.device, shape):
            if options.cases and not any(case.name.startswith(wanted) for wanted in options.cases):
                continue
            yield {"shape": shape} | measure(case.filled(SHAPES[shape].vocab_size), sides, options.rounds)
        for side in sides.values():
            side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), nargs="+", help="default: those of the device")
    parser.add_argument(
        "--against", choices=("peft", "torch"), help="beside the engine; torch: the engine without native code"
    )
    parser.add_argument("--peft-sequences", type=int, default=2**30, help="how many PEFT has at once; default: all")
    parser.add_argument("--cases", nargs="+", help="only cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="CPU threads of both sides; default: torch's")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        torch.set_num_threads(options.threads)
    facts = hardware() | {"threads": torch.get_num_threads()}
    shapes = options.shape or (["qwen3-0.6b"] if options.device == "cuda" else ["small", "smollm2-135m"])
    result: dict[str, Any] = {"hardware": facts, "rows": []}
    if options.against == "peft":
        result["peft_sequences"] = options.peft_sequences
    for shape in shapes:
        for row in run_shape(shape, options):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            if options.out:  # after each, because the whole may take an hour on a CPU
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
