"""What the two runners have in common: the tokens drawn, and what a draw needs to know of its sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from mint.engine.lora import Adapter, Rows
from mint.engine.sampler.logits import DrawParams, draw, logprobs_of, topk_rows
from mint.engine.sampler.sequence import Sequence
from mint.engine.sampler.steering import steered
from mint.engine.sampler.streams import uniforms
from mint.types import TopkRow


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens drawn for a sequence, in order."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    topk: list[TopkRow] = field(default_factory=list)
    """For each token, if somebody asked for them."""


def runs_of(adapters: Iterable[tuple[Adapter | None, int]]) -> Rows:
    """Neighbours with one adapter together."""
    rows: list[tuple[Adapter | None, int]] = []
    for adapter, count in adapters:
        if rows and rows[-1][0] is adapter:
            rows[-1] = (adapter, rows[-1][1] + count)
        else:
            rows.append((adapter, count))
    return rows


def drawn_from(logits_NV: Tensor, sequences: list[Sequence]) -> list[Drawn]:
    """A token for each sequence from its row, and what else was asked for."""
    ids_N = draw(steered(logits_NV, sequences), params_of(sequences))
    logprobs = logprobs_of(logits_NV, ids_N[:, None]).tolist()
    topk = likeliest(logits_NV, sequences)
    return [Drawn(*drawn) for drawn in zip(sequences, ids_N[:, None].tolist(), logprobs, topk, strict=True)]


def likeliest(logits_NV: Tensor, sequences: list[Sequence]) -> list[list[TopkRow]]:
    """For the one token each draws from its row: the likeliest, if somebody asked for them."""
    k = max(sequence.group.request.topk_sample_logprobs for sequence in sequences)
    return [[row] for row in topk_rows(logits_NV, k)] if k else [[]] * len(sequences)


def params_of(sequences: list[Sequence]) -> DrawParams:
    """Of their next draws."""
    params = [sequence.group.params for sequence in sequences]
    return DrawParams(
        temperature_N=np.array([p.temperature for p in params]),
        top_k_N=np.array([p.top_k for p in params]),
        top_p_N=np.array([p.top_p for p in params]),
        min_p_N=np.array([p.min_p for p in params]),
        uniform_N=uniforms_of(sequences, 1)[0],
    )


def uniforms_of(sequences: list[Sequence], steps: int, ahead: list[int] | None = None) -> np.ndarray:
    """The random numbers of the sequences' next draws, or after the next `ahead` of each, [steps, sequences]."""
    streams_N = np.array([sequence.stream for sequence in sequences], dtype=np.uint64)
    drawn_N = np.array([sequence.drawn for sequence in sequences], dtype=np.uint64)
    if ahead:
        drawn_N += np.array(ahead, dtype=np.uint64)
    return uniforms(streams_N[None], drawn_N[None] + np.arange(steps, dtype=np.uint64)[:, None])
