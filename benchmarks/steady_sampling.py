"""What bit-equal samples cost on a CPU without native code: tokens a second with and without the padding of
`mint.engine.steady`.

    python benchmarks/steady_sampling.py [--out benchmarks/results/steady_sampling.json]

One thread, and the time is the processor's, not the clock's, so that a busy machine does not matter. Both ways run in
turn, three times, the best of each is kept: the figure that carries over to another machine is the ratio.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from mint.engine import steady
from mint.engine.model import BaseModel
from mint.engine.sampler.runner import Runner
from mint.engine.sampler.sampler import Sampler
from mint.engine.sampler.torch_reader import TorchReader
from mint.types import LoraConfig, ModelInput, SampleRequest, SamplingParams

ROUNDS = 3
PROMPT = 48


def wide_model(folder: Path) -> str:
    """Four layers of the width of Qwen3-0.6B, random weights."""
    config = Qwen3Config(
        vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def tokens_per_second(model: BaseModel, samples: int, tokens: int) -> float:
    sampler = Sampler(model)
    sampler.runner = Runner(model, TorchReader(model, sampler.cache.block_size))
    adapter = model.new_adapter(LoraConfig(rank=16, seed=0)).snapshot()
    params = SamplingParams(max_tokens=tokens, seed=0, stop=[])
    prompt = ModelInput.from_ints([5 + n % 90 for n in range(PROMPT)])
    sampler.add(SampleRequest(prompt, params, samples), adapter, lambda answer: None)
    started = time.process_time()
    while sampler.has_work:
        sampler.step()
    return samples * tokens / (time.process_time() - started)


def compare(name: str, samples: int, tokens: int) -> dict[str, object]:
    ours, models = steady.row_multiple, {}
    best = {"steady": 0.0, "plain": 0.0}
    for way in best:
        steady.row_multiple = ours if way == "steady" else lambda device, dtype: 1
        models[way] = BaseModel.load(name)
    torch.set_num_threads(1)
    for _ in range(ROUNDS):
        for way, model in models.items():
            steady.row_multiple = ours if way == "steady" else lambda device, dtype: 1
            best[way] = max(best[way], tokens_per_second(model, samples, tokens))
    steady.row_multiple = ours
    return {"samples": samples, "tokens": tokens, **best, "ratio": best["steady"] / best["plain"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        wide = wide_model(Path(folder))
        for label, name, sizes in (("mint/tiny", "mint/tiny", (1, 8, 64, 256)), ("4 x 1024 wide", wide, (1, 2, 8, 32))):
            for samples in sizes:
                rows.append({"model": label} | compare(name, samples, 32 if name == wide else 128))
                line = "{model:>14} {samples:>4} samples: {plain:9.0f} plain, {steady:9.0f} steady, {ratio:5.2f}"
                print(line.format(**rows[-1]))
    result = {"hardware": f"{platform.processor() or platform.machine()}, one thread", "rows": rows}
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
