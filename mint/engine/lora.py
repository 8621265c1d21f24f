"""LoRA: one tenant's low-rank weights (`Adapter`), and the linear layer that adds many tenants' weights in one pass.

No module here belongs to an adapter: the base model is wrapped once, and which adapter a token uses is said by the
`Rows` of each forward pass. A run without an adapter is the base model itself.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from mint.backend import AdapterFacts
from mint.engine import steady
from mint.types import LoraConfig

# Constant for every rank, so that scale = ALPHA / rank keeps the best learning rate about the same across ranks.
ALPHA = 32

UNEMBEDDING = "lm_head"

Group = Literal["attn", "mlp", "unembed"]
Pair = tuple[Tensor, Tensor]


class Adapter:
    """One tenant's LoRA weights: for each adapted linear A [rank, in] and B [out, rank]; it adds scale * B(A x).

    All numbers lie in one tensor, `values_P`: A and B of each linear in turn, always in the same order, of which
    `weights` are the parts. So whoever copies, adds or updates them needs one call, however many linears there are.

    Trainable weights are float32 whatever the base model's dtype, because steps of 1e-5 vanish in bfloat16's eight
    bits; they are cast where they are used. `gradients_P` lies beside `values_P`, and is None until something was
    accumulated.
    """

    def __init__(
        self,
        base_model: str,
        config: LoraConfig,
        weights: Mapping[str, Pair],
        *,
        scale: float | None = None,
        trainable: bool = True,
    ) -> None:
        """The weights are copied."""
        self.base_model = base_model
        self.config = config
        self.scale = ALPHA / config.rank if scale is None else scale
        self.gradients_P: Tensor | None = None
        self._trainable = trainable
        self.paths = tuple(weights)
        given = [tensor for pair in weights.values() for tensor in pair]
        self._shapes = [torch.empty(()).expand(tensor.shape) for tensor in given]
        self.put(joined(given))

    @classmethod
    def create(cls, base_model: str, linears: Mapping[str, LoraLinear], config: LoraConfig) -> Adapter:
        """A as PEFT draws it (Kaiming uniform with a = sqrt 5, so within 1/sqrt(in)), B zero.

        Drawn on the CPU for every linear in turn, the chosen ones kept: a seed gives the same weights on any device,
        and turning a group off leaves those of the others as they were.
        """
        if config.seed is None:
            config = replace(config, seed=secrets.randbits(63))
        assert config.seed is not None
        generator = torch.Generator().manual_seed(config.seed)
        weights: dict[str, Pair] = {}
        for path, linear in linears.items():
            down = torch.empty(config.rank, linear.in_features)
            nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
            if trains(config, linear.group):
                up = torch.zeros(linear.out_features, config.rank)
                weights[path] = (down.to(linear.weight.device), up.to(linear.weight.device))
        return cls(base_model, config, weights)

    def put(self, values_P: Tensor) -> None:
        """These are the weights from now on, in the place of the others."""
        self.values_P = values_P
        self.__dict__.pop("weights", None)

    @cached_property
    def weights(self) -> dict[str, Pair]:
        """A and B by the paths of the linears."""
        parts = iter([part.requires_grad_(self._trainable) for part in self.shaped(self.values_P)])
        return {path: (next(parts), next(parts)) for path in self.paths}

    def parameters(self) -> list[Tensor]:
        """A and B of each linear in turn."""
        return [tensor for pair in self.weights.values() for tensor in pair]

    @property
    def gradients(self) -> list[Tensor] | None:
        """As `parameters()`."""
        return None if self.gradients_P is None else self.shaped(self.gradients_P)

    def shaped(self, values_P: Tensor) -> list[Tensor]:
        """Parts of one long tensor, in the order and the shapes of `parameters()`."""
        return list(_unflatten_dense_tensors(values_P, self._shapes))

    def gradients_of(self, total: Tensor, into: Tensor | None = None) -> Tensor:
        """Of a number that was computed with `weights`, as one row [1, P], which may be given."""
        found = torch.autograd.grad(total, self.parameters(), materialize_grads=True, allow_unused=True)
        return torch.cat([gradient.flatten() for gradient in found], out=None if into is None else into[0])[None]

    def accumulate(self, gradients_P: Tensor) -> None:
        """Adds gradients, which are given away, to those waiting for the next optimizer step."""
        if self.gradients_P is None:
            self.gradients_P = gradients_P
        else:
            self.gradients_P += gradients_P

    def twin(self) -> Adapter:
        """Another of its shape, its values not set."""
        return self._with(torch.empty_like(self.values_P), self._trainable)

    @torch.no_grad()
    def snapshot(self, dtype: torch.dtype | None = None) -> Adapter:
        """A frozen copy on the same device, in `dtype` if given; later training leaves it as it is."""
        return self._with(self.values_P.to(dtype or self.values_P.dtype, copy=True), trainable=False)

    def _with(self, values_P: Tensor, trainable: bool) -> Adapter:
        other = copy(self)
        other.gradients_P, other._trainable = None, trainable
        other.put(values_P)
        return other

    def facts(self) -> AdapterFacts:
        return AdapterFacts(len(self.values_P), self.paths)


@torch.no_grad()
def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all their numbers, one tensor's after the other's: one call and few launches, however many."""
    return _flatten_dense_tensors(tensors) if len(tensors) > 1 else tensors[0].detach().flatten().clone()


Rows = Sequence[tuple[Adapter | None, int]]
"""Consecutive runs of the packed tokens: (adapter, number of tokens); None is the base model."""


def group_of(path: str) -> Group:
    """Which of the three flags of `LoraConfig` a linear answers to."""
    if path == UNEMBEDDING:
        return "unembed"
    return "attn" if "attn" in path or "attention" in path else "mlp"


def trains(config: LoraConfig, group: Group) -> bool:
    return {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}[group]


def merged(weight: Tensor, scale: float, pair: Pair) -> Tensor:
    """The weight, in float32, of a plain linear that does what the weight and this LoRA do."""
    down, up = (half.to(weight.device) for half in pair)
    return weight.float() + scale * (up @ down)


class CurrentRows(threading.local):
    """The rows of the pass under way in this thread: one object a base model, which all its linears read."""

    def __init__(self, row_multiple: int = 1) -> None:
        self.row_multiple = row_multiple
        """What the rows of each run are rounded up to while they are computed (see `steady`)."""
        self.runs: list[tuple[Adapter | None, int]] = []

    def set(self, rows: Rows, tokens: int) -> None:
        """Neighbouring runs of one adapter become one, empty ones vanish."""
        runs: list[tuple[Adapter | None, int]] = []
        for adapter, count in rows:
            if runs and runs[-1][0] is adapter:
                runs[-1] = (adapter, runs[-1][1] + count)
            elif count:
                runs.append((adapter, count))
        assert sum(count for _, count in runs) == tokens, f"rows {rows} do not cover {tokens} tokens"
        self.runs = runs

    @contextmanager
    def instead(self, rows: Rows, tokens: int) -> Iterator[None]:
        """Other rows for a while; the unembedding sees only some of the tokens the layers before it saw."""
        before = self.runs
        self.set(rows, tokens)
        try:
            yield
        finally:
            self.runs = before


class LoraLinear(nn.Module):
    """A frozen linear that adds, to the rows of each run, the low-rank product of that run's adapter."""

    def __init__(self, linear: nn.Linear, path: str, group: Group, current: CurrentRows) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.path = path
        self.group = group
        self.out_features, self.in_features = linear.weight.shape
        self._current = current

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        runs = self._current.runs
        if not any(adapter is not None and self.path in adapter.weights for adapter, _ in runs):
            return out
        x_rows, out_rows = x.reshape(-1, self.in_features), out.reshape(-1, self.out_features)
        if len(runs) == 1:
            return self._add(out_rows, x_rows, runs[0][0]).view_as(out)
        sizes = [count for _, count in runs]
        parts = zip(out_rows.split(sizes), x_rows.split(sizes), runs, strict=True)
        return torch.cat([self._add(out_run, x_run, adapter) for out_run, x_run, (adapter, _) in parts]).view_as(out)

    def _add(self, out_NO: Tensor, x_NI: Tensor, adapter: Adapter | None) -> Tensor:
        pair = adapter.weights.get(self.path) if adapter is not None else None
        if adapter is None or pair is None:
            return out_NO
        return steady.low_rank(out_NO, x_NI, pair, adapter.scale, self._current.row_multiple)
