"""A loss written by the user, turned into one the server knows.

The gradient of any function C of the target log-probs is that of cross-entropy, -sum(w * logprob), with
w = -dC/dlogprob: so a forward pass, the user's function here, and a backward pass there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mint.checks import WEIGHTS
from mint.errors import BadRequest
from mint.types import Datum, ForwardBackwardOutput, TensorData

if TYPE_CHECKING:
    import torch

CustomLossFn = Callable[[list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, dict[str, float]]"]
"""From the data and the log-probs of their targets to the loss, a scalar, and metrics to report with it."""


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """Cross-entropy data whose gradient is the custom loss's, with that loss and its metrics."""

    data: list[Datum]
    loss: float
    metrics: dict[str, float]


def for_forward(data: Sequence[Datum]) -> list[Datum]:
    """What the forward pass needs; the other inputs stay here, for the user's function."""
    forward = []
    for index, datum in enumerate(data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise BadRequest(f"datum {index}: loss_fn_inputs lacks 'target_tokens', whose log-probs the loss is of.")
        given = (datum.loss_fn_inputs[key] for key in WEIGHTS if key in datum.loss_fn_inputs)
        weights = next(given, TensorData(np.zeros(targets.shape), "float32"))
        forward.append(Datum(datum.model_input, {"target_tokens": targets, "weights": weights}))
    return forward


def differentiate(loss_fn: CustomLossFn, data: list[Datum], forward: ForwardBackwardOutput) -> Surrogate:
    logprobs = [output["logprobs"].to_torch().requires_grad_(True) for output in forward.loss_fn_outputs]
    answer = loss_fn(data, logprobs)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise BadRequest(f"the custom loss returned {type(answer).__name__}; it must return (loss, metrics).")
    loss, metrics = answer
    if not getattr(loss, "requires_grad", False):
        raise BadRequest("the custom loss does not depend on the log-probs it was given, so there is no gradient.")
    loss.backward()
    surrogate = []
    for datum, logprob in zip(data, logprobs, strict=True):
        gradient = np.zeros(logprob.shape) if logprob.grad is None else logprob.grad.numpy()
        inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": TensorData(-gradient, "float32")}
        surrogate.append(Datum(datum.model_input, inputs))
    return Surrogate(surrogate, float(loss.detach()), dict(metrics))


def report(surrogate: Surrogate, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
    """The output of the backward pass, its loss renamed to make place for the custom one."""
    metrics = dict(output.metrics) | surrogate.metrics
    if "loss:sum" in output.metrics:
        metrics["surrogate_loss:sum"] = output.metrics["loss:sum"]
    return dataclasses.replace(output, metrics=metrics | {"loss:sum": surrogate.loss})
