"""One forward and backward pass over a micro-batch: tensors in, tensors out, and nothing looked at on the way.

A GPU is told of the whole pass before anybody waits for it, and all a pass does can be recorded and done again with
other tensors of the same shapes (`mint.engine.pass_graphs`).

Shapes: S targets of the micro-batch, C those that can matter to the loss, N calls that share the pass, P parameters of
an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mint.engine.batch import Batch
from mint.engine.logprobs import target_logprobs
from mint.engine.lora import Adapter
from mint.engine.losses import LossFn, LossTokens, Terms
from mint.engine.memory import used_memory
from mint.engine.model import BaseModel
from mint.engine.native.training import NativePass
from mint.engine.stack import Stack


@dataclass(frozen=True)
class Work:
    """What to do with a micro-batch."""

    loss: LossFn
    options: tuple[tuple[str, float], ...]
    backward: bool
    lean: bool
    threads: int = 1
    """That share a pass in native code."""


class Figures(NamedTuple):
    """Sums over the tokens that count, and whether all is well: one tensor on the device, then one of these."""

    finite_logprobs: float
    finite_loss: float
    finite_gradients: float
    loss: float
    tokens: float
    ratio: float | None = None
    """None, and so are the others, where the loss has no ratio."""
    ratio_min: float = 0.0
    ratio_max: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    clipped: float | None = None
    """None where nothing is clipped."""


class Pass(NamedTuple):
    logprobs_S: Tensor
    p_C: Tensor
    loss_C: Tensor
    figures: Tensor
    """A row for each call."""
    gradients: Sequence[Tensor]
    """Of all parameters of each call's adapter, one after the other; none where none were asked for."""
    kept: int
    """Bytes of a GPU that the forward pass kept for the backward pass."""


def compute(
    model: BaseModel, adapter: Adapter | Stack | None, batch: Batch, work: Work, into: Tensor | None = None
) -> Pass:
    """With a stack, each call of the batch has the adapter in its place. `into`: where the gradients go, [N, P]."""
    options = dict(work.options)
    on_gpu = model.device.type == "cuda"
    before = used_memory(model.device) if on_gpu else 0
    with torch.set_grad_enabled(work.backward):
        forward = _forward(model, adapter, batch, work, options.get("temperature", 1.0))
        logprobs_S = forward.logprobs_S
        tokens = batch.loss_tokens(logprobs_S)
        terms = work.loss(tokens, options)
        loss_C = batch.weights_C * terms.loss
        total = loss_C.sum()
    kept = used_memory(model.device) - before if on_gpu else 0
    gradients_NP: Tensor | None = None
    if work.backward and adapter is not None:
        gradients_NP = forward.gradients(total, into)
    figures = _figures(batch, logprobs_S, tokens, terms, loss_C, gradients_NP)
    gradients = () if gradients_NP is None else gradients_NP.unbind()
    return Pass(logprobs_S.detach(), tokens.p.detach(), loss_C.detach(), figures, gradients, kept)


@dataclass(frozen=True)
class TorchForward:
    """What `NativePass` is, through torch."""

    logprobs_S: Tensor
    adapter: Adapter | Stack | None

    def gradients(self, total: Tensor, into: Tensor | None) -> Tensor:
        assert self.adapter is not None
        return self.adapter.gradients_of(total, into)


def _forward(
    model: BaseModel, adapter: Adapter | Stack | None, batch: Batch, work: Work, temperature: float
) -> TorchForward | NativePass:
    if model.native_training is not None:
        assert not isinstance(adapter, Stack)
        return model.native_training.forward(adapter, batch, temperature, work.backward, work.lean, work.threads)
    layout = batch.layout or batch.tree
    owners = batch.owners if isinstance(adapter, Stack) else None
    hidden_TM = model.hidden_of_tree(batch.tokens_T, batch.positions_T, layout, adapter, work.lean, owners)
    return TorchForward(target_logprobs(model, adapter, hidden_TM, batch.targets, temperature, owners), adapter)


@torch.no_grad()
def _figures(
    batch: Batch, logprobs_S: Tensor, tokens: LossTokens, terms: Terms, loss_C: Tensor, gradients_NP: Tensor | None
) -> Tensor:
    """The fields of `Figures`, those that this loss has, for each call. What is not finite counts for its own call."""
    calls_N1 = torch.arange(batch.most_calls, device=loss_C.device)[:, None]
    mine_NS, mine_NC = batch.call_S == calls_N1, batch.call_S.index_select(0, batch.cells_C) == calls_N1
    counted_NC = mine_NC & batch.counted_C

    def total(values_C: Tensor) -> Tensor:
        return torch.where(counted_NC, values_C, 0).sum(1)

    values = [(torch.isfinite(found) | ~mine).all(1) for found, mine in ((logprobs_S, mine_NS), (loss_C, mine_NC))]
    gradients_NP = loss_C.new_zeros(len(calls_N1), 1) if gradients_NP is None else gradients_NP
    values.append(
        torch.isfinite(torch.stack(torch.aminmax(gradients_NP, dim=1))).all(0)
    )  # which takes one look at each
    values += [torch.where(mine_NC, loss_C, 0).sum(1), counted_NC.sum(1)]
    if terms.ratio is not None and len(loss_C):
        ratio_C = terms.ratio
        low, high = (torch.where(counted_NC, ratio_C, end) for end in (float("inf"), float("-inf")))
        values += [total(ratio_C), low.amin(1), high.amax(1), total(tokens.q - tokens.p), total(-tokens.p)]
        if terms.clipped is not None:
            values.append((counted_NC & terms.clipped).sum(1))
    return torch.stack([value.float() for value in values], dim=1)
