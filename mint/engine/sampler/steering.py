"""What moves a sequence's logits before it draws: penalties for tokens it has said, a bias, a grammar.

In this order, and all before the temperature and the filters. The log-prob of what is drawn is taken from the logits as
they were: it is the policy's own (docs/sampling.md).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mint.engine.sampler.grammar import Guide
from mint.engine.sampler.sequence import Sequence


def steered(logits_NV: Tensor, sequences: list[Sequence]) -> Tensor:
    """The logits to draw from, a row for each sequence; those given stay as they are."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.group.steered]
    if not rows:
        return logits_NV
    logits_NV = logits_NV.clone()
    for row in rows:
        _penalise(logits_NV[row], sequences[row])
        _constrain(logits_NV[row], sequences[row])
    return logits_NV


def _penalise(logits_V: Tensor, sequence: Sequence) -> None:
    params = sequence.group.params
    if params.repetition_penalty != 1:
        seen = _on(logits_V, np.unique(sequence.tokens))
        values = logits_V[seen]
        penalty = params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        drawn, counts = np.unique(np.array(_drawn(sequence), dtype=np.int64), return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        logits_V[_on(logits_V, drawn)] -= _on(logits_V, penalties.astype(np.float32))
    if params.logit_bias:
        tokens = _on(logits_V, np.fromiter(params.logit_bias, np.int64))
        logits_V[tokens] += _on(logits_V, np.fromiter(params.logit_bias.values(), np.float32))


def _constrain(logits_V: Tensor, sequence: Sequence) -> None:
    if (grammar := sequence.group.grammar) is None:
        return
    if sequence.guide is None:
        sequence.guide = Guide(grammar)
    forbidden_V = sequence.guide.forbidden(_drawn(sequence))
    if not sequence.guide.fault:  # otherwise any token will do: whoever looks at it sees the fault
        logits_V[_on(logits_V, forbidden_V[: len(logits_V)])] = -torch.inf


def _drawn(sequence: Sequence) -> list[int]:
    return sequence.tokens[len(sequence.group.prompt) :]


def _on(tensor: Tensor, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(tensor.device)
