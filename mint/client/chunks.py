"""Big batches in pieces: split by the server's limits on the way out, put together on the way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mint.columns import Columns
from mint.types import Datum, ForwardBackwardOutput

_BYTES_PER_TOKEN = 4


def split(data: Sequence[Datum], max_datums: int, max_bytes: int) -> list[Sequence[Datum]]:
    """Consecutive pieces, each within both limits; a datum that is too big by itself goes alone."""
    if isinstance(data, Columns) and len(data) <= max_datums and data.nbytes <= max_bytes:
        return [data]
    chunks: list[list[Datum]] = []
    room = 0
    for datum in data:
        size = estimated_bytes(datum)
        if not chunks or len(chunks[-1]) >= max_datums or size > room:
            chunks.append([])
            room = max_bytes
        chunks[-1].append(datum)
        room -= size
    return list(chunks)


def estimated_bytes(datum: Datum) -> int:
    tensors = sum(tensor.to_numpy().nbytes for tensor in datum.loss_fn_inputs.values())
    return _BYTES_PER_TOKEN * datum.model_input.length + tensors


def combine(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One output for all pieces: results in order, metrics reduced as the end of their name says."""
    if len(outputs) == 1:
        return outputs[0]
    return ForwardBackwardOutput(
        loss_fn_outputs=[datum for output in outputs for datum in output.loss_fn_outputs],
        metrics=_combine_metrics(outputs),
        loss_fn_output_type=outputs[0].loss_fn_output_type,
    )


Values = np.ndarray
_REDUCTIONS: dict[str, Callable[[Values, Values], float]] = {
    "sum": lambda values, _: values.sum(),
    "min": lambda values, _: values.min(),
    "max": lambda values, _: values.max(),
    "mean": lambda values, weights: np.average(values, weights=weights),
    "slack": lambda values, weights: values.max() - np.average(values, weights=weights),
    "hash2": lambda values, _: sum(int(v) for v in values) % 2**64,
}


def _combine_metrics(outputs: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    """A metric some piece lacks, or whose reduction is unknown, cannot be combined and is left out."""
    weights = np.array([len(output.loss_fn_outputs) for output in outputs], dtype=float)
    combined: dict[str, float] = {}
    for key in outputs[0].metrics:
        if not all(key in output.metrics for output in outputs):
            continue
        values = [output.metrics[key] for output in outputs]
        reduction = key.rpartition(":")[2]
        if reduction == "unique":
            combined |= {key if n == 0 else f"{key}_{n}": value for n, value in enumerate(values)}
        elif reduction in _REDUCTIONS:
            combined[key] = float(_REDUCTIONS[reduction](np.array(values), weights))
    return combined
