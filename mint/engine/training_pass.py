"""One forward and backward pass over a micro-batch: tensors in, tensors out, and nothing looked at on the way.

A GPU is told of the whole pass before anybody waits for it, and all a pass does can be recorded and done again with
other tensors of the same shapes (`mint.engine.pass_graphs`).

Shapes: S targets of the micro-batch, C those that can matter to the loss, P parameters of the adapter.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Work:
    """What to do with a micro-batch."""

    loss: LossFn
    options: tuple[tuple[str, float], ...]
    backward: bool
    lean: bool


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
    gradients_P: Tensor | None
    """Of all the adapter's parameters, one after the other."""
    kept: int
    """Bytes of a GPU that the forward pass kept for the backward pass."""


def compute(model: BaseModel, adapter: Adapter | None, batch: Batch, work: Work) -> Pass:
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
    gradients_P: Tensor | None = None
    if work.backward and adapter is not None:
        gradients_P = forward.gradients(total)
    figures = _figures(batch, logprobs_S, tokens, terms, loss_C, gradients_P)
    return Pass(logprobs_S.detach(), tokens.p.detach(), loss_C.detach(), figures, gradients_P, kept)


@dataclass(frozen=True)
class TorchForward:
    """What `NativePass` is, through torch."""

    logprobs_S: Tensor
    adapter: Adapter | None

    def gradients(self, total: Tensor) -> Tensor:
        parameters = [] if self.adapter is None else self.adapter.parameters()
        found = torch.autograd.grad(total, parameters, materialize_grads=True, allow_unused=True)
        return torch.cat([gradient.reshape(-1) for gradient in found])


def _forward(
    model: BaseModel, adapter: Adapter | None, batch: Batch, work: Work, temperature: float
) -> TorchForward | NativePass:
    if model.native_training is not None:
        return model.native_training.forward(adapter, batch, temperature, work.backward, work.lean)
    layout = batch.layout or batch.tree
    hidden_TM = model.hidden_of_tree(batch.tokens_T, batch.positions_T, layout, adapter, work.lean)
    return TorchForward(target_logprobs(model, adapter, hidden_TM, batch.targets, temperature), adapter)


@torch.no_grad()
def _figures(
    batch: Batch, logprobs_S: Tensor, tokens: LossTokens, terms: Terms, loss_C: Tensor, gradients_P: Tensor | None
) -> Tensor:
    """The fields of `Figures`, those that this loss has."""
    counted_C = batch.counted_C
    gradients_P = loss_C.new_zeros(1) if gradients_P is None or not len(gradients_P) else gradients_P
    values = [torch.isfinite(logprobs_S).all(), torch.isfinite(loss_C).all()]
    values.append(torch.isfinite(torch.stack(torch.aminmax(gradients_P))).all())  # which takes one look at each
    values += [loss_C.sum(), counted_C.sum()]
    if terms.ratio is not None and len(loss_C):

        def total(values_C: Tensor) -> Tensor:
            return torch.where(counted_C, values_C, 0).sum()

        ratio_C = terms.ratio
        low, high = (torch.where(counted_C, ratio_C, end) for end in (float("inf"), float("-inf")))
        values += [total(ratio_C), low.min(), high.max(), total(tokens.q - tokens.p), total(-tokens.p)]
        if terms.clipped is not None:
            values.append(torch.where(counted_C, terms.clipped, False).sum())
    return torch.stack([value.float() for value in values])
