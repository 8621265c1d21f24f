"""Datums checked (by `mint.checks`), packed into rows of tokens without padding, and taken apart again.

Datums that begin with the same tokens, as the samples of one prompt do, share the rows of those tokens (see
`mint.engine.tree`).

Shapes: N tokens of one datum, T packed tokens of a micro-batch, K targets a position (1 unless targets are soft),
S all targets of a micro-batch, C those of them that can matter to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from mint.backend import ModelFacts
from mint.checks import WEIGHTS, check_data
from mint.columns import Columns, compact
from mint.engine import tree
from mint.engine.layer_parts import Owners
from mint.engine.logprobs import Cells
from mint.engine.losses import LossOptions, LossTokens
from mint.engine.shared_attention import FlashLayout, flash_layout, power_of_two, rounded
from mint.engine.tree import Tree
from mint.errors import BadRequest
from mint.types import Datum

# Inputs that may be left out: then they are what loss_fn_config says for all tokens, or 0.
FILLED_IN = ("logprobs", "advantages", "clip_low_threshold", "clip_high_threshold")


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

    def part(self, start: int, stop: int) -> Example:
        """Those tokens alone, of datums laid end to end."""
        return Example(
            tokens_N=self.tokens_N[start:stop],
            targets_NK=self.targets_NK[start:stop],
            target_shape=(stop - start, *self.target_shape[1:]),
            weights_NK=self.weights_NK[start:stop],
            counted_NK=self.counted_NK[start:stop],
            inputs_NK={key: array[start:stop] for key, array in self.inputs_NK.items()},
        )


def read_data(data: Sequence[Datum], loss_fn: str, options: LossOptions, facts: ModelFacts) -> list[Example]:
    """Checks every datum, then fills in the inputs that were left out."""
    data = compact(data)
    check_data(data, loss_fn, facts.vocab_size, facts.max_context)
    if isinstance(data, Columns) and not {"clip_low_threshold", "clip_high_threshold"} & data.inputs.keys():
        whole = _read("the data", data.tokens, dict(data.inputs), options)
        ends = np.cumsum(data.lengths).tolist()
        return [whole.part(start, stop) for start, stop in pairwise([0, *ends])]
    return [
        _read(
            f"datum {index}",
            np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in datum.model_input.chunks]),
            {key: tensor.to_numpy() for key, tensor in datum.loss_fn_inputs.items()},
            options,
        )
        for index, datum in enumerate(data)
    ]


def _read(where: str, tokens_N: np.ndarray, inputs: dict[str, np.ndarray], options: LossOptions) -> Example:
    given = {"weights" if key in WEIGHTS else key: array for key, array in inputs.items()}
    targets = given.pop("target_tokens")
    ones = np.ones(targets.shape, np.float32)
    counted = given.get("weights", given.get("advantages", ones)) != 0
    weights = given.pop("weights", ones)
    filled = {key: given[key] if key in given else np.full_like(ones, options.get(key, 0.0)) for key in FILLED_IN}
    filled |= {"sequence_ratio_mask": counted.astype(np.float32)} | given
    if (crossed := filled["clip_low_threshold"] > filled["clip_high_threshold"]).any():
        raise BadRequest(
            f"{where}: clip_low_threshold is above clip_high_threshold at position {int(np.argmax(crossed))}; both "
            "bound the ratio itself."
        )

    def columns(array: np.ndarray, dtype: type = np.float32) -> np.ndarray:
        return array.reshape(len(tokens_N), -1).astype(dtype, copy=False)

    by_column = {key: columns(array) for key, array in filled.items()}
    return Example(
        tokens_N, columns(targets, np.int64), targets.shape, columns(weights), columns(counted, np.bool_), by_column
    )


@dataclass(frozen=True)
class Batch:
    """A micro-batch: the tokens of its examples in the rows of a tree.

    Filled, its sizes are rounded up so that few recorded passes serve all: rows nobody looks at behind those of the
    tree, targets of no weight behind the examples', and C is S, with neutral inputs for cells that cannot matter.
    """

    indices: list[int]
    """Which datum of its call each example is."""
    counts: list[int]
    """How many examples each call has that shares the pass, first those of the first."""
    target_shapes: list[tuple[int, ...]]
    tree: Tree
    layout: FlashLayout | None
    """Of a filled one: what attention needs to know."""
    sequences: int
    """Examples, or somewhat more in a filled one."""
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
    call_S: Tensor
    """Which call each target belongs to; -1 those that fill up."""
    owners: Owners
    """Which call each row belongs to, those that fill up to the last."""

    @property
    def most_calls(self) -> int:
        """How many might share the pass, those that do included."""
        return len(self.owners.starts) - 1

    def to(self, device: torch.device) -> Batch:
        return self.with_tensors([tensor.to(device) for tensor in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """All a pass reads; those of another batch of the same `size` fit in their place."""
        return [
            *(self.tokens_T, self.positions_T, *self.targets.tensors()),
            *(self.cells_C, self.sequence_C, self.weights_C, self.counted_C, *self.inputs_C.values()),
            *(self.call_S, *self.owners),
            *([] if self.layout is None else self.layout.tensors()),
        ]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """With others of the same shapes, in the order of `tensors()`."""
        given = iter(tensors)
        tokens_T, positions_T = next(given), next(given)
        targets = self.targets.with_tensors([next(given) for _ in self.targets.tensors()])
        cells_C, sequence_C, weights_C, counted_C = (next(given) for _ in range(4))
        return replace(
            self,
            tokens_T=tokens_T,
            positions_T=positions_T,
            targets=targets,
            cells_C=cells_C,
            sequence_C=sequence_C,
            weights_C=weights_C,
            counted_C=counted_C,
            inputs_C={key: next(given) for key in self.inputs_C},
            call_S=next(given),
            owners=Owners(next(given), next(given)),
            layout=self.layout and self.layout.with_tensors(list(given)),
        )

    @property
    def size(self) -> Hashable:
        """All that is no tensor, or the shape of one, as far as a pass knows it."""
        spans = None if self.layout is None else self.layout.spans()
        lengths = tuple(len(tensor) for tensor in self.tensors())
        return lengths, self.targets.live, self.targets.reach, self.sequences, spans

    def loss_tokens(self, logprobs_S: Tensor) -> LossTokens:
        return LossTokens(
            p=logprobs_S.index_select(0, self.cells_C),
            q=self.inputs_C["logprobs"],
            advantages=self.inputs_C["advantages"],
            clip_low=self.inputs_C["clip_low_threshold"],
            clip_high=self.inputs_C["clip_high_threshold"],
            in_ratio=self.inputs_C["sequence_ratio_mask"],
            sequence=self.sequence_C,
            sequences=self.sequences,
        )

    def locate(self, cell: int) -> tuple[int, int]:
        """The datum of the call and the position in it of entry `cell` of C."""
        sequence = int(self.sequence_C[cell])
        before = sum(math.prod(shape) for shape in self.target_shapes[:sequence])
        width = math.prod(self.target_shapes[sequence][1:])
        return self.indices[sequence], (int(self.cells_C[cell]) - before) // width

    def of_call(self, call: int, logprobs_S: Tensor) -> Iterator[tuple[int, np.ndarray]]:
        """The datums of one call, and their log-probs in the shape of their targets."""
        found_S = logprobs_S.detach().float().cpu().numpy()
        first = sum(self.counts[:call])
        place = sum(math.prod(shape) for shape in self.target_shapes[:first])
        for sequence in range(first, first + self.counts[call]):
            shape = self.target_shapes[sequence]
            yield self.indices[sequence], found_S[place : place + math.prod(shape)].reshape(shape)
            place += math.prod(shape)


class Part:
    """What one call has in a micro-batch: the examples of those indices."""

    def __init__(self, indices: Sequence[int], examples: Sequence[Example]) -> None:
        self.indices = list(indices)
        self.chosen = [examples[index] for index in indices]
        self.targets = sum(example.targets_NK.size for example in self.chosen)
        self.tree = tree.grow([example.tokens_N for example in self.chosen])


def pack(parts: Sequence[Part], filled: bool = False) -> Batch:
    """Lays the examples end to end, what those of one call begin with in common once. On the CPU."""
    chosen = [example for part in parts for example in part.chosen]
    grown = tree.beside([part.tree for part in parts])
    layout, rows = flash_layout(grown) if filled else (None, grown.size)
    widths = [example.targets_NK.shape[1] for example in chosen]
    rows_S = np.concatenate([np.repeat(rows, width) for rows, width in zip(grown.rows, widths, strict=True)])
    tokens_T = np.zeros(rows, np.int64)
    for path, example in zip(grown.rows, chosen, strict=True):
        tokens_T[path] = example.tokens_N

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([array.reshape(-1) for array in arrays])

    weights = joined([example.weights_NK for example in chosen])
    inputs = {key: joined([e.inputs_NK[key] for e in chosen]) for key in chosen[0].inputs_NK}
    matters = (weights != 0) | (inputs["sequence_ratio_mask"] != 0)
    live_T = np.zeros(rows, np.bool_)
    live_T[rows_S[weights != 0]] = True
    targets = joined([example.targets_NK for example in chosen])
    cells, count, sequences = np.flatnonzero(matters), len(targets), len(chosen)
    if filled:
        count = rows if count == grown.size else rounded(count, 16)
        sequences = power_of_two(sequences)
        # In the order of the cells that matter, then the others, then the filling.
        if len(cells) < count:
            cells = np.concatenate([cells, np.flatnonzero(~_lengthened(matters, count))])
        live_T[np.flatnonzero(~live_T)[: _live_rows(int(live_T.sum()), rows) - int(live_T.sum())]] = True
    matter = int(matters.sum())

    def of_cells(values_S: np.ndarray) -> Tensor:
        kept = values_S if matter == len(values_S) else values_S[matters]
        return torch.from_numpy(_lengthened(kept, count if filled else matter))

    # What fills up belongs to the last example, on rows of its call: nothing of another's may get there. On many rows,
    # for the sake of sums over a row's cells.
    sequence = np.repeat(np.arange(len(chosen)), [example.targets_NK.size for example in chosen])
    sequence = np.concatenate([sequence, np.full(count - len(targets), len(chosen) - 1)])
    filling = rows - 1 - np.arange(count - len(targets)) % (rows - grown.size + parts[-1].tree.size)
    placed = Cells.of(np.concatenate([rows_S, filling]), _lengthened(targets, count), live_T)
    return Batch(
        indices=[index for part in parts for index in part.indices],
        counts=[len(part.indices) for part in parts],
        target_shapes=[example.target_shape for example in chosen],
        tree=grown,
        layout=layout,
        sequences=sequences,
        tokens_T=torch.from_numpy(tokens_T),
        positions_T=torch.from_numpy(_lengthened(grown.positions(), rows)),
        targets=placed._replace(reach=count) if filled else placed,
        cells_C=torch.from_numpy(cells),
        sequence_C=torch.from_numpy(sequence[cells]),
        weights_C=of_cells(weights),
        counted_C=of_cells(joined([example.counted_NK for example in chosen])),
        inputs_C={key: of_cells(array) for key, array in inputs.items()},
        call_S=torch.from_numpy(_repeated([part.targets for part in parts], count, rest=-1)),
        owners=_owners([part.tree.size for part in parts], rows, power_of_two(len(parts)) if filled else len(parts)),
    )


def _owners(sizes: Sequence[int], rows: int, calls: int) -> Owners:
    """`calls`: how many the tensors have room for; those that are not there own nothing."""
    starts = [*accumulate(sizes[:-1], initial=0), *[rows] * (calls + 1 - len(sizes))]
    owner_T = _repeated(sizes, rows, rest=len(sizes) - 1)
    return Owners(torch.from_numpy(owner_T), torch.tensor(starts, dtype=torch.int32))


def _repeated(counts: Sequence[int], total: int, rest: int) -> np.ndarray:
    """0 as often as the first says, 1 as often as the second, and so on; `rest` up to the total."""
    numbers = np.array([*range(len(counts)), rest], np.int32)
    return np.repeat(numbers, [*counts, total - sum(counts)])


def _lengthened(values: np.ndarray, count: int) -> np.ndarray:
    """With zeros behind."""
    if count == len(values):
        return values
    return np.concatenate([values, np.zeros(count - len(values), values.dtype)])


def _live_rows(live: int, rows: int) -> int:
    """Rounded up to quarters of the rows: rows that are counted live without need cost a product, and nothing else."""
    step = -(-rows // 4)
    return min(rows, -(-live // step) * step)
