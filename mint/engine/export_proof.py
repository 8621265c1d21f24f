"""Proves that an exported folder computes what the trainer computes.

The folder is loaded in a new process by transformers (and PEFT) alone (`mint.engine.reload`), and its log-probs of
fixed tokens are compared with the trainer's, both in float32. Writing it is the business of `mint.engine.export`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mint.engine.checkpoint import Checkpoint
from mint.engine.device import Device
from mint.engine.lora import Adapter, merged
from mint.engine.model import BaseModel
from mint.engine.trainer import Trainer
from mint.errors import BadRequest, Internal
from mint.types import Datum, ModelInput, TensorData

EXACT = 1e-3
"""Largest difference of a log-prob that the order of summation explains; float32 throughout."""
LIMITS = {torch.float32: EXACT, torch.float16: 0.05, torch.bfloat16: 0.3}
"""The same with weights rounded to the format they are written in, as adding an adapter to half-precision weights does
(`docs/export.md` measures it). What rounding does not explain must be within `EXACT` all the same."""

PROBE_TEXTS = (
    "Q: What is 47 + 38?\nA: 85\n\nThe quick brown fox jumps over the lazy dog; 3.14159, 2.71828.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 40))  # 42\n",
)
_PROBE_TOKENS = 96


class Different(BadRequest):
    """What was written does not compute what the trainer does."""


@dataclass(frozen=True)
class Difference:
    """Between the log-probs of what was written and the trainer's."""

    largest: float
    mean: float
    beyond_rounding: float
    """The largest that is left when the trainer's weights are rounded in the same way."""
    tokens: int
    dtype: str
    """That the weights were written in."""
    limit: float


# The trainer --------------------------------------------------------------------------------------------------------


def probe(tokenizer: Any, vocab_size: int, max_context: int) -> list[list[int]]:
    """The fixed tokens: two texts, and two sequences of ids from all over the vocabulary, where a row of the embedding
    that went astray shows."""
    length = min(_PROBE_TOKENS, max_context)
    draw = random.Random(0)
    drawn = [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(2)]
    texts = [tokenizer.encode(text)[:length] for text in PROBE_TEXTS] if tokenizer is not None else []
    return [tokens for tokens in (*texts, *drawn) if len(tokens) > 1]


@dataclass(frozen=True)
class Truth:
    """What the trainer says."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    rounded: list[list[float]]
    """The same with the adapter added to the weights and the sum rounded, as in the folder."""
    texts: list[list[int]]
    """Tokens of `PROBE_TEXTS`; empty for a model without a tokenizer."""
    linears: list[str]


def trainers_truth(saved: Checkpoint, base: Path, device: Device, dtype: torch.dtype) -> Truth:
    model = BaseModel.load(str(base), device)
    tokenizer = model.tokenizer if model.has_tokenizer else None
    tokens = probe(tokenizer, model.facts.vocab_size, model.facts.max_context)
    logprobs = rounded = _logprobs(model, saved.policy(model.linears), tokens)
    if dtype != torch.float32:
        for path, (down, up) in saved.weights.items():
            linear = model.linears[path]
            linear.weight = nn.Parameter(merged(linear.weight, saved.scale, (down, up)).to(dtype).float(), False)
        model.weights_changed()
        rounded = _logprobs(model, None, tokens)
    texts = [tokenizer.encode(text) for text in PROBE_TEXTS] if tokenizer is not None else []
    return Truth(tokens, logprobs, rounded, texts, list(model.linears))


def _logprobs(model: BaseModel, adapter: Adapter | None, tokens: list[list[int]]) -> list[list[float]]:
    targets = [TensorData.of(np.array(ids[1:])) for ids in tokens]
    data = [Datum(ModelInput.from_ints(i[:-1]), {"target_tokens": t}) for i, t in zip(tokens, targets, strict=True)]
    work = Trainer(model).forward_backward(adapter, data, "cross_entropy", None, backward=False)
    try:
        while True:
            next(work)
    except StopIteration as done:
        return [output["logprobs"].to_numpy().tolist() for output in done.value.loss_fn_outputs]


# Proving ------------------------------------------------------------------------------------------------------------


def reload(folder: Path, base: Path | None, truth: Truth, device: Device) -> list[list[float]]:
    """The log-probs a new process finds, in which nothing of the engine is loaded."""
    asked = {
        "folder": str(folder),
        "base": str(base) if base else None,
        "tokens": truth.tokens,
        "texts": PROBE_TEXTS if truth.texts and base is None else [],
        "device": str(device.torch_device),
    }
    answer = _ask_new_process(asked)
    if asked["texts"] and answer["texts"] != truth.texts:
        raise Internal("the tokenizer that was written does not give the tokens of the base model's.")
    return answer["logprobs"]


def _ask_new_process(asked: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "mint.engine.reload"], input=json.dumps(asked), capture_output=True, text=True
    )
    if done.returncode:
        raise Internal(f"what was written cannot be loaded by transformers: {_last_line(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without a word"])[-1]


def compare(truth: Truth, found: list[list[float]], dtype: torch.dtype, limit: float) -> Difference:
    """Refuses what is too far off, or not a number."""
    gaps, beyond = _gaps(truth.logprobs, found), float(_gaps(truth.rounded, found).max())
    name = str(dtype).removeprefix("torch.")
    difference = Difference(float(gaps.max()), float(gaps.mean()), beyond, len(gaps), name, limit)
    allowed = max(EXACT, limit) if dtype == torch.float32 else EXACT
    if difference.largest <= limit and beyond <= allowed:
        return difference
    raise Different(
        f"what was written does not compute what the trainer does: of {len(gaps)} log-probs the largest difference is "
        f"{difference.largest:.3g} (limit {limit:.3g}), the mean {difference.mean:.3g}; rounding to {name} leaves "
        f"{beyond:.3g} of the largest unexplained (limit {allowed:.3g}). Nothing was left behind."
    )


def _gaps(expected: list[list[float]], found: list[list[float]]) -> Tensor:
    pairs = zip(expected, found, strict=True)
    return torch.cat([(torch.tensor(a, dtype=torch.float64) - torch.tensor(b)).abs() for a, b in pairs])
