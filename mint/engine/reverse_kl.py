"""Reverse KL to another policy over the whole vocabulary: the sum of w * KL(student || reference) over positions.

Through torch on every device, in chunks of positions whose logits are computed again for the backward pass, so that no
[tokens, vocabulary] tensor is kept. The reference may read another text before the same tokens, as a teacher does who
is told more.

Shapes: T rows of the tree, N positions that count (or a chunk of them), M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mint.engine.batch import Batch, Example, Part, pack, read_data
from mint.engine.logprobs import Head
from mint.engine.lora import UNEMBEDDING, Adapter
from mint.engine.model import BaseModel
from mint.engine.planning import plan
from mint.errors import BadRequest
from mint.types import Datum, ForwardBackwardOutput, TensorData


@dataclass(frozen=True)
class Policy:
    """Weights and what they read."""

    adapter: Adapter | None
    examples: list[Example]


def reverse_kl(
    model: BaseModel,
    adapter: Adapter,
    reference: Adapter | None,
    data: Sequence[Datum],
    reference_data: Sequence[Datum],
    temperature: float,
    token_budget: int,
    lean: bool,
) -> Generator[None, None, ForwardBackwardOutput]:
    """Pauses after each micro-batch; gradients are added to the adapter's at the end, and only if all is finite. Both
    lists hold the same weights, at the positions whose distributions are compared, one after the other."""
    student = Policy(adapter, read_data(data, "cross_entropy", {}, model.facts))
    teacher = Policy(reference, read_data(reference_data, "cross_entropy", {}, model.facts))
    losses = [np.zeros(example.target_shape, np.float32) for example in student.examples]
    gradients_P = torch.zeros_like(adapter.values_P)
    totals = np.zeros(3)
    for indices in plan([example.tokens_N for example in student.examples], token_budget):
        model.use_threads()
        batch, rows_N = _packed(model, student, indices)
        with torch.no_grad():
            other, other_rows_N = _packed(model, teacher, indices)
            other_NM = _hidden(model, teacher, other, lean)[other_rows_N]
        own_NM = _hidden(model, student, batch, lean)[rows_N]
        targets_N = torch.cat([torch.from_numpy(_counted(student.examples[i]).targets) for i in indices])
        weights_N = torch.cat([torch.from_numpy(_counted(student.examples[i]).weights) for i in indices])
        kl_N, logprobs_N = _divergences(model, student, teacher, own_NM, other_NM, targets_N, temperature)
        loss_N = kl_N * weights_N.to(kl_N.device)
        found_1P = adapter.gradients_of(loss_N.sum())
        if not (torch.isfinite(loss_N).all() and torch.isfinite(found_1P).all()):
            raise BadRequest(
                "the divergence or its gradient is not finite: the adapter or the reference has diverged, or weights "
                "are too large. Nothing was accumulated."
            )
        gradients_P += found_1P[0]
        totals += [loss_N.sum().item(), kl_N.sum().item(), -logprobs_N.sum().item()]
        _spread(loss_N.detach().cpu().numpy(), [student.examples[i] for i in indices], [losses[i] for i in indices])
        yield
    adapter.accumulate(gradients_P)
    count = sum(len(_counted(example).weights) for example in student.examples)
    metrics = {"loss:sum": totals[0], "tokens:sum": float(count)}
    if count:
        metrics |= {"kl:mean": totals[1] / count, "entropy_sampled:mean": totals[2] / count}
    return ForwardBackwardOutput([{"loss": TensorData.of(loss)} for loss in losses], metrics)


@dataclass(frozen=True)
class _Counted:
    """The positions of an example that have a weight."""

    places: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def _counted(example: Example) -> _Counted:
    places = np.flatnonzero(example.weights_NK[:, 0])
    return _Counted(places, example.targets_NK[places, 0], example.weights_NK[places, 0])


def _packed(model: BaseModel, policy: Policy, indices: Sequence[int]) -> tuple[Batch, Tensor]:
    """The micro-batch on the device, and the rows of the positions that count, in the order of the datums."""
    batch = pack([Part(indices, policy.examples)], model.trains_filled)
    paths = zip(batch.tree.rows, (policy.examples[index] for index in indices), strict=True)
    rows = np.concatenate([path[_counted(example).places] for path, example in paths])
    return batch.to(model.device), torch.from_numpy(rows).to(model.device)


def _hidden(model: BaseModel, policy: Policy, batch: Batch, lean: bool) -> Tensor:
    layout = batch.layout or batch.tree
    return model.hidden_of_tree(batch.tokens_T, batch.positions_T, layout, policy.adapter, lean)


def _divergences(
    model: BaseModel, student: Policy, teacher: Policy, own_NM: Tensor, other_NM: Tensor, targets_N: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """KL at each position, and the student's log-prob of the target there."""
    own, other = (Head.of(model, policy.adapter, temperature) for policy in (student, teacher))
    pair, other_pair = (_unembedding(policy.adapter) for policy in (student, teacher))
    targets_N = targets_N.to(own_NM.device)

    def chunk(own_NM: Tensor, other_NM: Tensor, targets_N: Tensor, *pair: Tensor) -> tuple[Tensor, Tensor]:
        p_NV = own.logits(own_NM, pair).log_softmax(-1)
        with torch.no_grad():
            q_NV = other.logits(other_NM, other_pair).log_softmax(-1)
        return (p_NV.exp() * (p_NV - q_NV)).sum(-1), p_NV.detach().gather(1, targets_N[:, None])[:, 0]

    found = [
        checkpoint(chunk, own_NM[a:b], other_NM[a:b], targets_N[a:b], *pair, use_reentrant=False)
        for a, b in own.chunks(0, len(own_NM))
    ]
    nothing = own_NM.sum(-1).float()[:0]
    kl, logprobs = zip(*found, strict=True) if found else ((nothing,), (nothing,))
    return torch.cat(kl), torch.cat(logprobs)


def _unembedding(adapter: Adapter | None) -> tuple[Tensor, ...]:
    return tuple(adapter.weights.get(UNEMBEDDING, ())) if adapter is not None else ()


def _spread(loss_N: np.ndarray, examples: Sequence[Example], losses: Sequence[np.ndarray]) -> None:
    """To the datums' own arrays."""
    start = 0
    for example, loss in zip(examples, losses, strict=True):
        places = _counted(example).places
        loss.reshape(-1)[places] = loss_N[start : start + len(places)]
        start += len(places)
