"""Datums checked (by `mint.checks`), packed into rows of tokens without padding, and taken apart again.

Datums that begin with the same tokens, as the samples of one prompt do, share the rows of those tokens (see
`mint.engine.tree`).

Shapes: N tokens of one datum, T packed tokens of a micro-batch, K targets a position (1 unless targets are soft),
S all targets of a micro-batch, C those of them that can matter to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mint.backend import ModelFacts
from mint.checks import WEIGHTS, check_data
from mint.engine import tree
from mint.engine.logprobs import Cells
from mint.engine.losses import LossOptions, LossTokens
from mint.engine.tree import Tree
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


def plan(sequences: Sequence[np.ndarray], token_budget: int) -> list[list[int]]:
    """Groups datums into micro-batches of at most `token_budget` tokens, a longer datum alone; what datums begin with
    in common counts once, and such datums stay together as far as the budget goes. Longest first: memory peaks in the
    first micro-batch rather than in the last, and neighbours of like length waste least in attention."""
    batches: list[list[int]] = []
    room = 0
    for cluster, cost in sorted(_clusters(sequences, token_budget), key=lambda c: -len(sequences[c[0][0]])):
        if not batches or cost > room:
            batches.append([])
            room = token_budget
        batches[-1] += cluster
        room -= cost
    return batches


def _clusters(sequences: Sequence[np.ndarray], token_budget: int) -> list[tuple[list[int], int]]:
    """Indices of datums that begin alike, the longest first, and how many tokens they have together."""
    order = tree.alike(sequences)
    shared = tree.shared_lengths([sequences[i] for i in order])
    found: list[tuple[list[int], int]] = []
    for index, common in zip(order, shared, strict=True):
        common = common if common >= tree.SHORTEST_SHARED else 0
        added = len(sequences[index]) - common
        if found and common and found[-1][1] + added <= token_budget:
            cluster, cost = found[-1]
            found[-1] = ([*cluster, index], cost + added)
        else:
            found.append(([index], len(sequences[index])))
    return [(sorted(cluster, key=lambda i: (-len(sequences[i]), i)), cost) for cluster, cost in found]


@dataclass(frozen=True)
class Batch:
    """A micro-batch: the tokens of its examples in the rows of a tree."""

    indices: list[int]
    """Which datums of the call these are."""
    target_shapes: list[tuple[int, ...]]
    tree: Tree
    tokens_T: Tensor
    positions_T: Tensor
    targets: Cells
    """Every target of every example, in order."""
    cells_C: Tensor
    """Indices into `targets` of the cells below."""
    sequence_C: Tensor
    weights_C: Tensor
    counted_C: Tensor
    inputs_C: dict[str, Tensor]

    def loss_tokens(self, logprobs_S: Tensor) -> LossTokens:
        return LossTokens(
            p=logprobs_S[self.cells_C],
            q=self.inputs_C["logprobs"],
            advantages=self.inputs_C["advantages"],
            clip_low=self.inputs_C["clip_low_threshold"],
            clip_high=self.inputs_C["clip_high_threshold"],
            in_ratio=self.inputs_C["sequence_ratio_mask"],
            sequence=self.sequence_C,
            sequences=len(self.indices),
        )

    def locate(self, cell: int) -> tuple[int, int]:
        """The datum of the call and the position in it of entry `cell` of C."""
        sequence = int(self.sequence_C[cell])
        before = sum(math.prod(shape) for shape in self.target_shapes[:sequence])
        width = math.prod(self.target_shapes[sequence][1:])
        return self.indices[sequence], (int(self.cells_C[cell]) - before) // width

    def split(self, logprobs_S: Tensor) -> list[np.ndarray]:
        """Log-probs of each example, in the shape of its targets."""
        parts = logprobs_S.detach().float().cpu().split([math.prod(shape) for shape in self.target_shapes])
        return [part.reshape(shape).numpy() for part, shape in zip(parts, self.target_shapes, strict=True)]


def pack(indices: Sequence[int], examples: Sequence[Example], device: torch.device) -> Batch:
    """Lays the examples of those indices end to end, what they begin with in common once."""
    chosen = [examples[index] for index in indices]
    grown = tree.grow([example.tokens_N for example in chosen])
    widths = [example.targets_NK.shape[1] for example in chosen]
    rows_S = np.concatenate([np.repeat(rows, width) for rows, width in zip(grown.rows, widths, strict=True)])
    tokens_T = np.zeros(grown.size, np.int64)
    for rows, example in zip(grown.rows, chosen, strict=True):
        tokens_T[rows] = example.tokens_N

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([array.reshape(-1) for array in arrays])

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    weights = joined([example.weights_NK for example in chosen])
    inputs = {key: joined([e.inputs_NK[key] for e in chosen]) for key in chosen[0].inputs_NK}
    cells = np.flatnonzero((weights != 0) | (inputs["sequence_ratio_mask"] != 0))
    live_T = np.zeros(grown.size, np.bool_)
    live_T[rows_S[weights != 0]] = True
    return Batch(
        indices=list(indices),
        target_shapes=[example.target_shape for example in chosen],
        tree=grown,
        tokens_T=tensor(tokens_T),
        positions_T=tensor(grown.positions()),
        targets=Cells(rows_S, joined([example.targets_NK for example in chosen]), live_T, device),
        cells_C=tensor(cells),
        sequence_C=tensor(np.repeat(np.arange(len(chosen)), [e.targets_NK.size for e in chosen])[cells]),
        weights_C=tensor(weights[cells]),
        counted_C=tensor(joined([example.counted_NK for example in chosen])[cells]),
        inputs_C={key: tensor(array[cells]) for key, array in inputs.items()},
    )
