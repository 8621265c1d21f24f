"""`Columns`: a batch of datums as a few arrays, so that what is asked of every token is asked once.

Most batches can be told so: every loss input has one number for each token, and all datums have the same inputs. What
cannot is handled datum by datum, which is also where faults are named. Nothing is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from mint.types import Datum, EncodedTextChunk, ModelInput, TensorData


@dataclass(frozen=True, eq=False)
class Columns(Sequence[Datum]):
    lengths: np.ndarray
    """Tokens of each datum."""
    tokens: np.ndarray
    """int64, of all datums one after the other."""
    inputs: Mapping[str, np.ndarray]
    """Each float32 or int64, and as long as the tokens."""

    @classmethod
    def of(cls, data: Sequence[Datum]) -> Columns | None:
        """None for a batch that cannot be told in columns, one without datums among them."""
        if isinstance(data, Columns):
            return data
        if not data:
            return None
        lengths = [datum.model_input.length for datum in data]
        keys = data[0].loss_fn_inputs.keys()
        found: dict[str, list[np.ndarray]] = {key: [] for key in keys}
        for length, datum in zip(lengths, data, strict=True):
            if datum.loss_fn_inputs.keys() != keys:
                return None
            for key, tensor in datum.loss_fn_inputs.items():
                array = tensor.to_numpy()
                if array.shape != (length,):
                    return None
                found[key].append(array)
        if any(array.dtype != arrays[0].dtype for arrays in found.values() for array in arrays):
            return None
        try:
            runs = [np.asarray(chunk.tokens, dtype=np.int64) for datum in data for chunk in datum.model_input.chunks]
            tokens = np.concatenate(runs)
        except (OverflowError, TypeError, ValueError):
            return None
        if tokens.shape != (sum(lengths),):
            return None
        return cls(np.array(lengths), tokens, {key: np.concatenate(arrays) for key, arrays in found.items()})

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each datum begins in a column."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def nbytes(self) -> int:
        """Of all columns, a token counting as it does on the wire: four bytes."""
        return 4 * len(self.tokens) + sum(column.nbytes for column in self.inputs.values())

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Datum: ...
    @overload
    def __getitem__(self, index: slice) -> list[Datum]: ...
    def __getitem__(self, index: int | slice) -> Datum | list[Datum]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        start, length = int(self.starts[index]), int(self.lengths[index])
        here = slice(start, start + length)
        inputs = {
            key: TensorData(column[here], "float32" if column.dtype.kind == "f" else "int64")
            for key, column in self.inputs.items()
        }
        return Datum(ModelInput([EncodedTextChunk(self.tokens[here].tolist())]), inputs)

    def __iter__(self) -> Iterator[Datum]:
        return (self[n] for n in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def token_count(data: Sequence[Datum]) -> int:
    return len(data.tokens) if isinstance(data, Columns) else sum(datum.model_input.length for datum in data)


def compact(data: Sequence[Datum]) -> Sequence[Datum]:
    """In columns where that can be."""
    columns = Columns.of(data)
    return data if columns is None else columns
