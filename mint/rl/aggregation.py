"""How token losses become one number: the table of aggregations, as a factor on every datum.

Losses on the wire are plain sums over tokens. All policy losses but `dro` are linear in the advantage, so a mean of
some kind is the same sum with scaled advantages, and the server need not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from mint.errors import BadRequest
from mint.types import Datum, TensorData

TrajectoryKey = tuple[int, int]
"""(group, member): a trajectory may have become several datums."""


def unmasked_tokens(datum: Datum) -> float:
    return float(datum.loss_fn_inputs["mask"].to_numpy().sum())


def _token_sum(tokens_D: list[float], keys_D: list[TrajectoryKey], divisor: float | None) -> list[float]:
    return [1.0] * len(tokens_D)


def _token_mean(tokens_D: list[float], keys_D: list[TrajectoryKey], divisor: float | None) -> list[float]:
    return [1.0 / sum(tokens_D)] * len(tokens_D)


def _sequence_mean(tokens_D: list[float], keys_D: list[TrajectoryKey], divisor: float | None) -> list[float]:
    tokens: Counter[TrajectoryKey] = Counter()
    for key, count in zip(keys_D, tokens_D, strict=True):
        tokens[key] += count  # type: ignore[assignment]
    return [1.0 / (tokens[key] * len(tokens)) for key in keys_D]


def _constant(tokens_D: list[float], keys_D: list[TrajectoryKey], divisor: float | None) -> list[float]:
    if divisor is None or not divisor > 0:
        raise BadRequest(f"constant aggregation needs a divisor above 0, usually max_tokens; got {divisor}.")
    return [1.0 / (divisor * len(set(keys_D)))] * len(tokens_D)


AGGREGATIONS: dict[str, Callable[[list[float], list[TrajectoryKey], float | None], list[float]]] = {
    "token_sum": _token_sum,  # sum over tokens: Tinker's and MinT's own
    "token_mean": _token_mean,  # sum over tokens / tokens in the step: DAPO (arXiv 2503.14476)
    "sequence_mean": _sequence_mean,  # mean over sequences of the mean over their tokens: GRPO (arXiv 2402.03300)
    "constant": _constant,  # sum over tokens / (sequences * divisor): Dr. GRPO (arXiv 2503.20783)
}


def aggregation_scales(
    data_D: Sequence[Datum],
    metadata_D: Sequence[dict[str, int]],
    aggregation: str,
    divisor: float | None = None,
) -> np.ndarray:
    """One factor per datum, for the datums of one optimizer step. Sequences are trajectories with a trained token."""
    if aggregation not in AGGREGATIONS:
        raise BadRequest(f"no aggregation is called {aggregation!r}; there are {', '.join(AGGREGATIONS)}.")
    keys_D = [(meta["group_idx"], meta["traj_idx"]) for meta in metadata_D]
    if not data_D:
        return np.zeros(0)
    return np.array(AGGREGATIONS[aggregation]([unmasked_tokens(datum) for datum in data_D], keys_D, divisor))


def scale_advantages(data_D: Sequence[Datum], scales_D: np.ndarray) -> list[Datum]:
    return [
        Datum(
            datum.model_input,
            {
                **datum.loss_fn_inputs,
                "advantages": TensorData.of(datum.loss_fn_inputs["advantages"].to_numpy() * np.float32(scale)),
            },
        )
        for datum, scale in zip(data_D, scales_D, strict=True)
    ]
