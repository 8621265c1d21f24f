"""Datums checked (by `mint.checks`), packed into rows of tokens without padding, and taken apart again.

Shapes: N tokens of one datum, T packed tokens of a micro-batch, K targets a position (1 unless targets are soft),
C cells of [T, K] that can matter to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.backend import ModelFacts
from mint.checks import WEIGHTS, check_data
from mint.engine.losses import LossOptions, LossTokens
from mint.errors import BadRequest
from mint.types import Datum


@dataclass(frozen=True)
class Example:
    """A datum that passed every check, with every loss input present."""

    tokens_N: np.ndarray
    targets_NK: np.ndarray
    target_shape: tuple[int, ...]
    weights_NK: np.ndarray
    counted_NK: np.ndarray
    """True where a target counts in metrics and sequence ratios: its weight is not 0 or, where no weights were given,
    its advantage is not 0 (clients that send no weights mark prompts by advantage 0 and a placeholder log-prob)."""
    inputs_NK: dict[str, np.ndarray]


def read_data(data: Sequence[Datum], loss_fn: str, options: LossOptions, facts: ModelFacts) -> list[Example]:
    """Checks every datum, then fills in the inputs that were left out."""
    check_data(data, loss_fn, facts.vocab_size, facts.max_context)
    return [_read(f"datum {index}", datum, options) for index, datum in enumerate(data)]


def _read(where: str, datum: Datum, options: LossOptions) -> Example:
    tokens_N = np.asarray(datum.model_input.to_ints(), dtype=np.int64)
    given = {"weights" if key in WEIGHTS else key: t.to_numpy() for key, t in datum.loss_fn_inputs.items()}
    targets = given.pop("target_tokens")
    ones = np.ones(targets.shape, np.float32)
    counted = given.get("weights", given.get("advantages", ones)) != 0
    defaults = {
        "logprobs": 0.0 * ones,
        "advantages": 0.0 * ones,
        "clip_low_threshold": options.get("clip_low_threshold", 0.0) * ones,
        "clip_high_threshold": options.get("clip_high_threshold", 0.0) * ones,
        "sequence_ratio_mask": counted.astype(np.float32),
    }
    weights = given.pop("weights", ones)
    inputs = defaults | given
    if (crossed := inputs["clip_low_threshold"] > inputs["clip_high_threshold"]).any():
        raise BadRequest(
            f"{where}: clip_low_threshold is above clip_high_threshold at position {int(np.argmax(crossed))}; both "
            "bound the ratio itself."
        )

    def columns(array: np.ndarray, dtype: type = np.float32) -> np.ndarray:
        return array.reshape(len(tokens_N), -1).astype(dtype, copy=False)

    by_column = {key: columns(array) for key, array in inputs.items()}
    return Example(
        tokens_N, columns(targets, np.int64), targets.shape, columns(weights), columns(counted, np.bool_), by_column
    )


def plan(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Groups datums into micro-batches of at most `token_budget` tokens, a longer datum alone. Longest first: memory
    peaks in the first micro-batch rather than in the last, and neighbours of like length waste least in attention."""
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or lengths[index] > room:
            batches.append([])
            room = token_budget
        batches[-1].append(index)
        room -= lengths[index]
    return batches


@dataclass(frozen=True)
class Batch:
    """A micro-batch: examples laid end to end."""

    indices: list[int]
    """Which datums of the call these are."""
    target_shapes: list[tuple[int, ...]]
    lengths: list[int]
    tokens_T: Tensor
    positions_T: Tensor
    targets_TK: Tensor
    cells_C: Tensor
    """Flat indices into [T, K] of the cells below."""
    sequence_C: Tensor
    weights_C: Tensor
    counted_C: Tensor
    inputs_C: dict[str, Tensor]

    def loss_tokens(self, logprobs_TK: Tensor) -> LossTokens:
        return LossTokens(
            p=logprobs_TK.reshape(-1)[self.cells_C],
            q=self.inputs_C["logprobs"],
            advantages=self.inputs_C["advantages"],
            clip_low=self.inputs_C["clip_low_threshold"],
            clip_high=self.inputs_C["clip_high_threshold"],
            in_ratio=self.inputs_C["sequence_ratio_mask"],
            sequence=self.sequence_C,
            sequences=len(self.lengths),
        )

    def locate(self, cell: int) -> tuple[int, int]:
        """The datum of the call and the position in it of entry `cell` of C."""
        sequence = int(self.sequence_C[cell])
        token = int(self.cells_C[cell]) // self.targets_TK.shape[1]
        return self.indices[sequence], token - sum(self.lengths[:sequence])

    def split(self, logprobs_TK: Tensor) -> list[np.ndarray]:
        """Log-probs of each example, in the shape of its targets."""
        parts = logprobs_TK.detach().float().cpu().split(self.lengths)
        widths = [shape[1] if len(shape) == 2 else 1 for shape in self.target_shapes]
        cut = zip(parts, widths, self.target_shapes, strict=True)
        return [part[:, :width].reshape(shape).numpy() for part, width, shape in cut]


def pack(indices: Sequence[int], examples: Sequence[Example], device: torch.device) -> Batch:
    """Lays the examples of those indices end to end; rows of fewer targets are filled with cells of weight 0."""
    chosen = [examples[index] for index in indices]
    lengths = [len(example.tokens_N) for example in chosen]
    width = max(example.targets_NK.shape[1] for example in chosen)

    def widened(array_NK: np.ndarray) -> np.ndarray:
        short = width - array_NK.shape[1]
        return np.pad(array_NK, ((0, 0), (0, short))) if short else array_NK

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([widened(array) for array in arrays])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    weights = joined([example.weights_NK for example in chosen]).reshape(-1)
    inputs = {key: joined([e.inputs_NK[key] for e in chosen]).reshape(-1) for key in chosen[0].inputs_NK}
    cells = np.flatnonzero((weights != 0) | (inputs["sequence_ratio_mask"] != 0))
    return Batch(
        indices=list(indices),
        target_shapes=[example.target_shape for example in chosen],
        lengths=lengths,
        tokens_T=tensor(np.concatenate([example.tokens_N for example in chosen])),
        positions_T=tensor(np.concatenate([np.arange(length) for length in lengths])),
        targets_TK=tensor(joined([example.targets_NK for example in chosen])),
        cells_C=tensor(cells),
        sequence_C=tensor(np.repeat(np.arange(len(chosen)), np.asarray(lengths) * width)[cells]),
        weights_C=tensor(weights[cells]),
        counted_C=tensor(joined([example.counted_NK for example in chosen]).reshape(-1)[cells]),
        inputs_C={key: tensor(array[cells]) for key, array in inputs.items()},
    )
