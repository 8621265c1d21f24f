"""Arrays of numbers as they cross from room to room: dense, float32 or int64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mint.errors import BadRequest

if TYPE_CHECKING:
    import torch

TensorDtype = Literal["float32", "int64"]


class TensorData:
    """A dense float32 or int64 array. Sparse (CSR) input is made dense on arrival, absent cells being 0."""

    __slots__ = ("_array", "dtype")

    def __init__(
        self,
        data: Sequence[Any] | np.ndarray,
        dtype: TensorDtype,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if dtype not in ("float32", "int64"):
            raise BadRequest(f"TensorData dtype is {dtype!r}; it must be 'float32' or 'int64'.")
        array = np.asarray(data, dtype=dtype)
        if sparse_crow_indices is not None or sparse_col_indices is not None:
            array = _densify(array.ravel(), shape, sparse_crow_indices, sparse_col_indices)
        elif shape is not None:
            if any(n < 0 for n in shape) or math.prod(shape) != array.size:
                raise BadRequest(f"TensorData has {array.size} values, which do not fill the shape {list(shape)}.")
            array = array.reshape(tuple(shape))
        self._array = array
        self.dtype = dtype

    @classmethod
    def of(cls, values: Any, dtype: TensorDtype | None = None) -> TensorData:
        """Anything array-like: a list, a numpy array, a torch tensor; the dtype is inferred if not given."""
        if isinstance(values, TensorData):
            return values
        if hasattr(values, "detach"):  # a torch tensor, without importing torch
            values = values.detach().cpu()
            values = (values.float() if values.is_floating_point() else values).numpy()
        array = np.asarray(values)
        if array.dtype.kind not in "fiub":
            raise BadRequest(f"expected numbers, got an array of {array.dtype} (ragged or non-numeric input).")
        return cls(array, dtype or ("float32" if array.dtype.kind == "f" else "int64"))

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        return cls.of(array)

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> TensorData:
        return cls.of(tensor)

    @property
    def shape(self) -> list[int]:
        return list(self._array.shape)

    @property
    def data(self) -> list[Any]:
        """The values as one flat list."""
        return self._array.ravel().tolist()

    def to_numpy(self) -> np.ndarray:
        return self._array

    def to_torch(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(np.array(self._array))  # a copy: torch wants writable memory

    def tolist(self) -> list[Any]:
        return self._array.tolist()

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return self.dtype == other.dtype and np.array_equal(
            self._array, other._array, equal_nan=self.dtype == "float32"
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TensorData({np.array2string(self._array, threshold=8)}, dtype={self.dtype!r}, shape={self.shape})"

    def __getstate__(self) -> tuple[np.ndarray, TensorDtype]:
        return self._array, self.dtype

    def __setstate__(self, state: tuple[np.ndarray, TensorDtype]) -> None:
        self._array, self.dtype = state


_MAX_CELLS = 2**28  # 1 GiB of float32: a shape is only two numbers, and must not be able to ask for all memory


def _densify(
    values: np.ndarray, shape: Sequence[int] | None, crow: Sequence[int] | None, col: Sequence[int] | None
) -> np.ndarray:
    if crow is None or col is None or shape is None or len(shape) != 2:
        raise BadRequest("a sparse tensor needs sparse_crow_indices, sparse_col_indices and a shape of two numbers.")
    rows, columns = shape
    if min(rows, columns) < 0 or rows * columns > _MAX_CELLS:
        raise BadRequest(f"a sparse tensor has the shape {list(shape)}; made dense it may have {_MAX_CELLS} cells.")
    crow_indices, col_indices = np.asarray(crow, dtype=np.int64), np.asarray(col, dtype=np.int64)
    counts = np.diff(crow_indices)
    if len(crow_indices) != rows + 1 or (counts < 0).any() or crow_indices[0] != 0 or crow_indices[-1] != len(values):
        raise BadRequest(f"sparse_crow_indices do not describe {len(values)} values in {rows} rows.")
    if len(col_indices) != len(values) or (len(values) and not (0 <= col_indices.min() <= col_indices.max() < columns)):
        raise BadRequest(
            f"sparse_col_indices must hold one column in 0..{columns - 1} for each of {len(values)} values."
        )
    dense = np.zeros((rows, columns), dtype=values.dtype)
    dense[np.repeat(np.arange(rows), counts), col_indices] = values
    return dense
