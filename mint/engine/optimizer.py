"""AdamW for one adapter: its settings come with every step, its state goes in and out as tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mint.engine.lora import Adapter
from mint.errors import BadRequest
from mint.types import AdamParams

_PIECE = 4096


class AdamW:
    """Decoupled weight decay, bias correction, clipping by the global norm of the gradient."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.steps = 0
        self._mean_P = torch.zeros_like(adapter.values_P)
        self._square_P = torch.zeros_like(adapter.values_P)

    @torch.no_grad()
    def step(self, params: AdamParams) -> dict[str, float]:
        """Applies and clears the accumulated gradients. Without any nothing moves, momentum included, and the metrics
        say so."""
        gradients_P, self._adapter.gradients_P = self._adapter.gradients_P, None
        if gradients_P is None:
            return {"optim/skipped": 1.0, "optim/step": float(self.steps), "optim/lr": params.learning_rate}
        weights_P = self._adapter.values_P
        grad_norm = float(_norm(gradients_P))
        if params.grad_clip_norm and grad_norm > params.grad_clip_norm:
            gradients_P *= params.grad_clip_norm / grad_norm
        self.steps += 1
        self._mean_P.lerp_(gradients_P, 1 - params.beta1)
        self._square_P.mul_(params.beta2).addcmul_(gradients_P, gradients_P, value=1 - params.beta2)
        update_P = self._update(params)
        if params.weight_decay:
            update_P.add_(weights_P, alpha=-params.learning_rate * params.weight_decay)
        weights_P += update_P
        update_norm, weight_norm = torch.stack([_norm(update_P), _norm(weights_P)]).tolist()
        return {
            "optim/skipped": 0.0,
            "optim/step": float(self.steps),
            "optim/lr": params.learning_rate,
            "optim/grad_norm": grad_norm,
            "optim/update_norm": update_norm,
            "optim/weight_norm": weight_norm,
        }

    def _update(self, params: AdamParams) -> Tensor:
        """-lr * mean / (1 - beta1^n) / (sqrt(square / (1 - beta2^n)) + eps)"""
        divisor_P = self._square_P.sqrt().div_((1 - params.beta2**self.steps) ** 0.5).add_(params.eps)
        return torch.div(self._mean_P, divisor_P).mul_(-params.learning_rate / (1 - params.beta1**self.steps))

    def state(self) -> dict[str, Tensor]:
        """`step`, and mean and square of each weight's gradient under the weight's name."""
        return {"step": torch.tensor(self.steps)} | {name: tensor.clone() for name, tensor in self._by_name().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        places = self._by_name()
        wrong = [name for name, place in places.items() if name not in state or state[name].shape != place.shape]
        if wrong or "step" not in state or len(state) != len(places) + 1:
            raise BadRequest(
                f"the optimizer state has {len(state)} tensors that do not match the adapter's {len(places) + 1}"
                + (f"; the first amiss is {wrong[0]}." if wrong else ".")
            )
        self.steps = int(state["step"])
        for name, place in places.items():
            place.copy_(state[name])

    def moments(self) -> list[Tensor]:
        """Mean and square of the gradients, each beside the adapter's values."""
        return [self._mean_P, self._square_P]

    def put_moments(self, mean_P: Tensor, square_P: Tensor) -> None:
        self._mean_P, self._square_P = mean_P, square_P

    def reset(self) -> None:
        self.steps = 0
        self._mean_P.zero_()
        self._square_P.zero_()

    def _by_name(self) -> dict[str, Tensor]:
        """Parts of the moments."""
        names = [f"{path}.{which}" for path in self._adapter.paths for which in ("A", "B")]
        parts = (self._adapter.shaped(moment_P) for moment_P in self.moments())
        found: dict[str, Tensor] = {}
        for name, mean, square in zip(names, *parts, strict=True):
            found[f"{name}.mean"], found[f"{name}.square"] = mean, square
        return found


def _norm(values_P: Tensor) -> Tensor:
    """In pieces, as the sum of ten million squares one after the other loses digits."""
    whole = len(values_P) // _PIECE * _PIECE
    pieces = torch.linalg.vector_norm(values_P[:whole].view(-1, _PIECE), dim=1)
    return torch.linalg.vector_norm(torch.cat([pieces, values_P[whole:]]))
