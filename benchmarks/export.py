"""How closely exported folders agree with the trainer: every format, for base models in three number formats.

    python benchmarks/export.py [--out results.json]

The bundled model, cast, with a rank-16 adapter trained on additions for a hundred steps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mint.engine import checkpoint
from mint.engine.device import Device
from mint.engine.export import FORMATS, export
from mint.engine.hub import find_folder
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.optimizer import AdamW
from mint.engine.trainer import Trainer
from mint.types import AdamParams, Datum, LoraConfig, ModelInput, TensorData

STEPS, BATCH = 100, 16


def addition(model: BaseModel, draw: random.Random) -> Datum:
    a, b = draw.randrange(100), draw.randrange(100)
    tokens = model.tokenizer.encode(f"Q: What is {a} + {b}?\nA: {a + b}\n")
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": TensorData.of(np.array(tokens[1:]))})


def trained(folder: Path) -> Adapter:
    model = BaseModel.load(str(folder), Device(torch.device("cpu"), torch.float32, "exact"))
    adapter = model.new_adapter(LoraConfig(rank=16, seed=1))
    optimizer, trainer, draw = AdamW(adapter), Trainer(model), random.Random(1)
    for _ in range(STEPS):
        list(
            trainer.forward_backward(
                adapter, [addition(model, draw) for _ in range(BATCH)], "cross_entropy", None, True
            )
        )
        optimizer.step(AdamParams(learning_rate=1e-3))
    return adapter


def cast(base: Path, dtype: torch.dtype, folder: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            work = Path(name) / str(dtype)
            base = cast(find_folder("mint/tiny"), dtype, work / "base")
            checkpoint.save(work / "checkpoint", trained(base))
            for form in FORMATS[:2]:  # the third has the weights of the second
                told = asdict(export(work / "checkpoint", form, work / form, limit=10.0))
                found.append({"base": str(dtype).removeprefix("torch."), "format": form} | told)
                print("{base:>10} {format:>8}  largest {largest:.2e}  mean {mean:.2e}".format(**found[-1]))
    line = json.dumps({"steps": STEPS, "differences": found})
    if options.out:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
