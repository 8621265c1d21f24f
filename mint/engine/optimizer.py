"""AdamW for one adapter: its settings come with every step, its state goes in and out as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mint.engine.lora import Adapter
from mint.errors import BadRequest
from mint.types import AdamParams


class AdamW:
    """Decoupled weight decay, bias correction, clipping by the global norm of the gradient."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.steps = 0
        self._mean = [torch.zeros_like(p, requires_grad=False) for p in adapter.parameters()]
        self._square = [torch.zeros_like(p, requires_grad=False) for p in adapter.parameters()]

    @torch.no_grad()
    def step(self, params: AdamParams) -> dict[str, float]:
        """Applies and clears the accumulated gradients. Without any nothing moves, momentum included, and the metrics
        say so."""
        gradients, self._adapter.gradients = self._adapter.gradients, None
        if gradients is None:
            return {"optim/skipped": 1.0, "optim/step": float(self.steps), "optim/lr": params.learning_rate}
        weights = [p.detach() for p in self._adapter.parameters()]
        grad_norm = _global_norm(gradients)
        if params.grad_clip_norm and grad_norm > params.grad_clip_norm:
            torch._foreach_mul_(gradients, params.grad_clip_norm / grad_norm)
        self.steps += 1
        torch._foreach_lerp_(self._mean, gradients, 1 - params.beta1)
        torch._foreach_mul_(self._square, params.beta2)
        torch._foreach_addcmul_(self._square, gradients, gradients, 1 - params.beta2)
        update = self._update(params)
        if params.weight_decay:
            torch._foreach_add_(update, weights, alpha=-params.learning_rate * params.weight_decay)
        torch._foreach_add_(weights, update)
        return {
            "optim/skipped": 0.0,
            "optim/step": float(self.steps),
            "optim/lr": params.learning_rate,
            "optim/grad_norm": grad_norm,
            "optim/update_norm": _global_norm(update),
            "optim/weight_norm": _global_norm(weights),
        }

    def _update(self, params: AdamParams) -> list[Tensor]:
        """-lr * mean / (1 - beta1^n) / (sqrt(square / (1 - beta2^n)) + eps)"""
        divisor = torch._foreach_sqrt(self._square)
        torch._foreach_div_(divisor, (1 - params.beta2**self.steps) ** 0.5)
        torch._foreach_add_(divisor, params.eps)
        update = torch._foreach_div(self._mean, divisor)
        torch._foreach_mul_(update, -params.learning_rate / (1 - params.beta1**self.steps))
        return list(update)

    def state(self) -> dict[str, Tensor]:
        """`step`, and mean and square of each weight's gradient under the weight's name."""
        state = {"step": torch.tensor(self.steps)}
        for name, mean, square in zip(self._names(), self._mean, self._square, strict=True):
            state[f"{name}.mean"], state[f"{name}.square"] = mean.clone(), square.clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        expected = self.state()
        wrong = [name for name, t in expected.items() if name not in state or state[name].shape != t.shape]
        if wrong or len(state) != len(expected):
            raise BadRequest(
                f"the optimizer state has {len(state)} tensors that do not match the adapter's {len(expected)}"
                + (f"; the first amiss is {wrong[0]}." if wrong else ".")
            )
        self.steps = int(state["step"])
        for name, mean, square in zip(self._names(), self._mean, self._square, strict=True):
            mean.copy_(state[f"{name}.mean"])
            square.copy_(state[f"{name}.square"])

    def moments(self) -> list[Tensor]:
        """Mean and square of the gradients, in the order of the adapter's parameters, one after the other."""
        return [*self._mean, *self._square]

    def put_moments(self, moments: Sequence[Tensor]) -> None:
        half = len(self._mean)
        self._mean, self._square = list(moments[:half]), list(moments[half:])

    def reset(self) -> None:
        self.steps = 0
        torch._foreach_zero_(self._mean)
        torch._foreach_zero_(self._square)

    def _names(self) -> list[str]:
        return [f"{path}.{which}" for path in self._adapter.weights for which in ("A", "B")]


def _global_norm(tensors: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))
