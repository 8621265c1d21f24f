"""What proving every policy costs, as a share of a training step, and how far sampler and trainer are apart.

    python benchmarks/verification.py [--device cuda] [--out benchmarks/results/verification.json]

A step is that of the quickstart: a snapshot, 16 prompts with 8 samples of 16 tokens each, one forward_backward over
them and one optimizer step. Counted is what the proof does by itself, the comparison of the copy and the trainer's
pass; its 21 tokens in two of the sampler's steps are lost among the others'. On the CPU the time is the processor's, on
one thread, so that a busy machine does not matter. The gap is the largest difference between a log-prob of the sampler
and one of the trainer, over all proofs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from mint.engine import engine as engine_module
from mint.engine import verify
from mint.engine.device import Device
from mint.engine.engine import Engine
from mint.types import AdamParams, Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams

PROMPTS, GROUP, PROMPT, ANSWER = 16, 8, 48, 16


def wide_model(folder: Path, layers: int) -> str:
    """Layers of the width of Qwen3-0.6B. Random weights, larger than usual: logits spread as a trained model's do."""
    config = Qwen3Config(
        vocab_size=4096, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.08,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def step(
    engine: Engine, rng: np.random.Generator, number: int, clock: Callable[[], float]
) -> tuple[float, tuple[float, float]]:
    """Seconds, and the gap the proof found, on average and at most."""
    prompts = rng.integers(0, 250, (PROMPTS, PROMPT)).tolist()
    started = clock()
    engine.snapshot("a", "p").result()
    params = SamplingParams(max_tokens=ANSWER, seed=number, stop=[])
    asked = [engine.sample("p", SampleRequest(ModelInput.from_ints(prompt), params, GROUP)) for prompt in prompts]
    data = []
    for prompt, answer in zip(prompts, asked, strict=True):
        for n, sequence in enumerate(answer.result().sequences):
            full = prompt + sequence.tokens
            assert sequence.logprobs is not None
            inputs = {
                "target_tokens": full[1:],
                "logprobs": [0.0] * (PROMPT - 1) + sequence.logprobs,
                "advantages": [0.0] * (PROMPT - 1) + [(n - 3.5) / 16] * ANSWER,
            }
            data.append(Datum(ModelInput.from_ints(full[:-1]), inputs))
    engine.forward_backward("a", data, "importance_sampling", {}).result()
    metrics = engine.optim_step("a", AdamParams(learning_rate=1e-4)).result()
    return clock() - started, (metrics["policy/logprob_gap_mean"], metrics["policy/logprob_gap_max"])


@dataclass
class Stopwatch:
    """Seconds spent in what the proof does by itself."""

    clock: Callable[[], float]
    seconds: float = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any) -> Any:
            started = self.clock()
            try:
                return call(*args)
            finally:
                self.seconds += self.clock() - started

        return timed_call


def measure(label: str, model: str, device: Device | None, steps: int) -> dict[str, Any]:
    clock = time.thread_time if device is None else time.perf_counter
    watch = Stopwatch(clock)
    verify.Verifier._conclude = watch.timed(verify.Verifier._conclude)  # type: ignore[method-assign]
    engine_module.check_copy = watch.timed(verify.check_copy)
    engine = Engine([model], device)
    engine.create_adapter("a", model, LoraConfig(rank=16, seed=0)).result()
    rng = np.random.default_rng(0)
    clock = time.process_time if device is None else time.perf_counter
    shares, spent, means, gaps = [], [], [], []
    for number in range(steps + 1):
        watch.seconds = 0.0
        seconds, gap = step(engine, rng, number, clock)
        if number:  # the first one warms up, and its gap is told by the second
            shares.append(watch.seconds / seconds)
            spent.append(watch.seconds)
            means.append(gap[0])
            gaps.append(gap[1])
    engine.close()
    share = statistics.median(shares)
    return {
        "model": label,
        "proof_ms": 1e3 * statistics.median(spent),
        "share": share,
        "gap_mean": max(means),
        "gap_max": max(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = None
    hardware = f"{platform.processor() or platform.machine()}, one thread"
    if args.device == "cuda":
        hardware = torch.cuda.get_device_name()
        device = Device(torch.device("cuda"), torch.bfloat16, "asked for")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        wide = wide_model(Path(folder), args.layers)
        for label, model in (("mint/tiny", "mint/tiny"), (f"{args.layers} x 1024 wide", wide)):
            rows.append(measure(label, model, device, args.steps))
            line = "{model:>15}: proof {proof_ms:.1f} ms, {share:.2%} of it; gap {gap_mean:.2g}, {gap_max:.2g} at most"
            print(line.format(**rows[-1]))
    result = {"hardware": hardware, "dtype": "float32" if device is None else "bfloat16", "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
