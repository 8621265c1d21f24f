"""Log-probs of target tokens straight from hidden states, in chunks: no [tokens, vocabulary] tensor, forward or back.

The gradient of a log-prob in its hidden state is W[target] - mean of W under the softmax. That mean needs no loss, so
it is taken in the forward pass, while the logits are there: the backward pass computes none, unless the unembedding
itself is trained.

Shapes: T tokens, M hidden size, C cells (a token and one of its targets), N live or a chunk's tokens, V vocabulary,
R rank, X = M, or M + R where the unembedding is adapted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.layer_parts import Owners
from mint.engine.lora import UNEMBEDDING, Adapter
from mint.engine.model import BaseModel
from mint.engine.stack import Stack

# Logits of one chunk: on a CPU few enough to stay in its cache between the products; on a GPU 512 MiB of bfloat16, so
# that the products and not their launch take the time.
CHUNK_LOGITS = {"cpu": 2**20, "cuda": 2**28}
FEWEST_ROWS = 64


class Cells(NamedTuple):
    """Which log-probs are wanted: of each cell the row of its hidden state and its target token.

    Kept in the order they are computed in: cells of live rows, which may have a gradient, before those of the others.
    """

    order_T: Tensor
    places_C: Tensor
    """Of each cell, where its row comes in `order_T`."""
    targets_C: Tensor
    back_C: Tensor
    """The way back to the order the cells were given in."""
    live: int
    """How many rows are live."""
    reach: int
    """No cell from here on belongs to a live row."""

    @classmethod
    def of(cls, rows_C: np.ndarray, targets_C: np.ndarray, live_T: np.ndarray) -> Cells:
        """On the CPU."""
        live = int(live_T.sum())
        if live == len(live_T):  # as most are
            order_T, places_C = np.arange(live), rows_C
        else:
            order_T = np.concatenate([np.flatnonzero(live_T), np.flatnonzero(~live_T)])
            places_C = _inverse(order_T)[rows_C]
        order_C = np.argsort(places_C, kind="stable")
        places_C = places_C[order_C]
        return cls(
            order_T=torch.from_numpy(order_T),
            places_C=torch.from_numpy(places_C),
            targets_C=torch.from_numpy(targets_C[order_C]),
            back_C=torch.from_numpy(_inverse(order_C)),
            live=live,
            reach=int(np.searchsorted(places_C, live)),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return self.order_T, self.places_C, self.targets_C, self.back_C

    def with_tensors(self, tensors: Sequence[Tensor]) -> Cells:
        order_T, places_C, targets_C, back_C = tensors
        return Cells(order_T, places_C, targets_C, back_C, self.live, self.reach)


def _inverse(order: np.ndarray) -> np.ndarray:
    """Of a permutation."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


def target_logprobs(
    model: BaseModel, adapter: Adapter | Stack | None, hidden_TM: Tensor, cells: Cells, temperature: float = 1.0,
    owners: Owners | None = None,
) -> Tensor:  # fmt: skip
    """log softmax(logits / temperature) of each cell, [C] in float32; differentiable in the hidden states of live rows
    and in the unembedding's adapter. `owners`: for a stack of adapters."""
    pair = adapter.weights.get(UNEMBEDDING, ()) if adapter is not None else ()
    head = Head.of(model, adapter, temperature)
    ordered_TM = hidden_TM.index_select(0, cells.order_T)
    owner_T = owners.owner_T.index_select(0, cells.order_T) if owners is not None and pair else None
    return _TargetLogprobs.apply(head, cells, owner_T, ordered_TM, *pair).index_select(0, cells.back_C)


class Head:
    """The unembedding, with what stands between its product and the softmax."""

    def __init__(self, model: BaseModel, scale: float, temperature: float) -> None:
        linear = model.linears[UNEMBEDDING]
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.temperature, self.softcap = scale, temperature, model.softcap
        kind = model.device.type if model.device.type in CHUNK_LOGITS else "cpu"
        self.chunk = max(FEWEST_ROWS, CHUNK_LOGITS[kind] // len(self.weight))
        self._powers = _fastest_powers(model.device)

    @classmethod
    def of(cls, model: BaseModel, adapter: Adapter | Stack | None, temperature: float) -> Head:
        return cls(model, adapter.scale if isinstance(adapter, Adapter) else 1.0, temperature)

    def logits(self, hidden_NM: Tensor, pair: Sequence[Tensor]) -> Tensor:
        """[N, V] in float32, as the softmax sees them; differentiable in the hidden states and the pair."""
        products_NV = F.linear(hidden_NM, self.weight, self.bias)
        if pair:
            down, up = (weight.to(hidden_NM.dtype) for weight in pair)
            products_NV = products_NV + (hidden_NM @ down.T * self.scale) @ up.T
        return self.bent(products_NV.float())[0]

    def bent(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Logits as the softmax sees them, and their derivative in the products."""
        if self.softcap is None:
            return products / self.temperature, torch.full_like(products, 1 / self.temperature)
        tanh = torch.tanh(products / self.softcap)
        return tanh * (self.softcap / self.temperature), (1 - tanh.square()) / self.temperature

    def powers(self, products_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `_powers`, perhaps in the products' place."""
        return self._powers(products_NV, self.temperature, self.softcap)

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        for first in range(start, stop, self.chunk):
            yield first, min(first + self.chunk, stop)


Powers = Callable[[Tensor, float, float | None], tuple[Tensor, Tensor, Tensor]]


def _fastest_powers(device: torch.device) -> Powers:
    if device.type != "cuda":
        return _powers
    from mint.engine.kernels import training  # there only where there is Triton

    return training.powers


def _powers(products_NV: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logit - largest), times the slope of the softcap, in the products' dtype; its sum without; the largest."""
    logits_NV = products_NV.float()
    slope_NV = None
    if softcap is not None:
        logits_NV = torch.tanh(logits_NV / softcap)
        slope_NV = 1 - logits_NV.square()
        logits_NV = logits_NV * softcap
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    largest_N1 = logits_NV.amax(dim=1, keepdim=True)
    # In place: on a CPU new memory costs more than the arithmetic, and nobody else has these products.
    powers_NV = logits_NV.sub_(largest_N1).exp_()
    sum_N1 = powers_NV.sum(dim=1, keepdim=True)
    if slope_NV is not None:
        powers_NV = powers_NV.mul_(slope_NV)
    return powers_NV.to(products_NV.dtype), sum_N1, largest_N1


class _Unembedding:
    """The unembedding of hidden states [T, M] in the order of the cells, with what an adapter adds to it: a product of
    [h, scale * A h] and [W, B]."""

    def __init__(self, head: Head, hidden_TM: Tensor, pair: Sequence[Tensor]) -> None:
        self._head, self._hidden_TM, self._pair = head, hidden_TM, pair
        self._wide_TX, self._weight_VX = hidden_TM, head.weight
        if pair:
            down, up = (weight.detach().to(hidden_TM.dtype) for weight in pair)
            self._wide_TX = torch.cat([hidden_TM, hidden_TM @ down.T * head.scale], 1)
            self._weight_VX = torch.cat([head.weight, up], 1)

    def products(self, start: int, stop: int) -> Tensor:
        """Of some rows, [N, V]."""
        return F.linear(self._wide_TX[start:stop], self._weight_VX, self._head.bias)

    def mean(self, powers_NV: Tensor, start: int, stop: int) -> Tensor:
        """The weighted sum of [W, B]'s rows, [N, X]."""
        return powers_NV @ self._weight_VX

    def rows(self, places_C: Tensor, targets_C: Tensor) -> Tensor:
        """Of [W, B], [C, X]."""
        return self._weight_VX[targets_C]

    def back(self, found_NX: Tensor, taken_N1: Tensor, places_C: Tensor, targets_C: Tensor, given_C1: Tensor) -> Any:
        """The gradients of the first rows' hidden states [N, M], of A and of B. `found_NX`: of [h, A h]; `given_C1`: of
        the products at the cells; `taken_N1`: what the softmax takes from all of a row's."""
        head, (down, up), live, width = self._head, self._pair, len(found_NX), self._hidden_TM.shape[1]
        found_NM, found_NR = found_NX[:, :width], found_NX[:, width:] * head.scale
        inner_NR = self._wide_TX[:live, width:].float()
        grad_up = torch.zeros_like(up).index_add_(0, targets_C, inner_NR[places_C] * given_C1)
        for start, stop in head.chunks(0, live):
            powers_NV, sum_N1, _ = head.powers(self.products(start, stop))
            taken_NR = inner_NR[start:stop] * (taken_N1[start:stop] / sum_N1)
            grad_up.sub_(powers_NV.T @ taken_NR.to(powers_NV.dtype))
        grad_NM = torch.addmm(found_NM, found_NR, down.float())
        return grad_NM, found_NR.T @ self._hidden_TM[:live].float(), grad_up


class _OwnedUnembedding:
    """The same with an adapter of each row's own: A [G, R, M], the scale in it, and B [G, V, R] of all of them, in
    kernels for that (`mint.engine.kernels.owned_rows`)."""

    def __init__(self, head: Head, cells: Cells, owner_T: Tensor, hidden_TM: Tensor, pair: Sequence[Tensor]) -> None:
        self._head, self._owner_T, self._hidden_TM = head, owner_T, hidden_TM
        self._down, self._up = (weight.detach() for weight in pair)
        self._sizes = [len(head.weight)]
        # Owners are in order among the live rows, and among the others.
        ranges = ((0, cells.live), (cells.live, len(hidden_TM)))
        self._inner_TR = torch.cat([self._shrink(hidden_TM[a:b], self._down, a, b, False) for a, b in ranges if b > a])

    def _shrink(self, x: Tensor, matrix: Tensor, start: int, stop: int, apart: bool) -> Tensor:
        sizes = self._sizes if apart else [x.shape[1]]
        return torch.ops.mint.owned_shrink(x, matrix, self._owner_T[start:stop], sizes, apart)

    def products(self, start: int, stop: int) -> Tensor:
        products_NV = F.linear(self._hidden_TM[start:stop], self._head.weight, self._head.bias)
        inner_NR, owner_N = self._inner_TR[start:stop], self._owner_T[start:stop]
        torch.ops.mint.owned_add_(products_NV, inner_NR, self._up, owner_N, self._sizes, True)
        return products_NV

    def mean(self, powers_NV: Tensor, start: int, stop: int) -> Tensor:
        return torch.cat([powers_NV @ self._head.weight, self._shrink(powers_NV, self._up, start, stop, True)], 1)

    def rows(self, places_C: Tensor, targets_C: Tensor) -> Tensor:
        return torch.cat([self._head.weight[targets_C], self._up[self._owner_T[places_C], targets_C]], 1)

    def back(self, found_NX: Tensor, taken_N1: Tensor, places_C: Tensor, targets_C: Tensor, given_C1: Tensor) -> Any:
        head, live, width = self._head, len(found_NX), self._hidden_TM.shape[1]
        found_NM, found_NR = found_NX[:, :width], found_NX[:, width:].to(self._down.dtype).contiguous()
        owner_N, inner_NR = self._owner_T[:live], self._inner_TR[:live].float()
        grad_up = torch.zeros(self._up.shape, dtype=torch.float32, device=found_NX.device)
        cells_C = self._owner_T[places_C].long() * grad_up.shape[1] + targets_C
        grad_up.flatten(0, 1).index_add_(0, cells_C, inner_NR[places_C] * given_C1)
        for start, stop in head.chunks(0, live):
            powers_NV, sum_N1, _ = head.powers(self.products(start, stop))
            taken_NR = inner_NR[start:stop] * (-taken_N1[start:stop] / sum_N1)
            starts = self._starts(owner_N[start:stop])
            torch.ops.mint.owned_sums_(grad_up, powers_NV, taken_NR.to(powers_NV.dtype), starts)
        grad_NM = torch.ops.mint.owned_add(found_NM.contiguous(), found_NR, self._down, owner_N, [width], False)
        hidden_NM, starts = self._hidden_TM[:live], self._starts(owner_N)
        grad_down = torch.ops.mint.owned_sums(hidden_NM, found_NR, starts, [width], False)
        return grad_NM, grad_down, grad_up.to(self._up.dtype)

    def _starts(self, owner_N: Tensor) -> Tensor:
        adapters = torch.arange(len(self._up) + 1, dtype=owner_N.dtype, device=owner_N.device)
        return torch.searchsorted(owner_N, adapters, out_int32=True)


class _TargetLogprobs(torch.autograd.Function):
    """Of hidden states in the order of the cells. Saves, for live rows, the mean of [W, B] under the softmax."""

    @staticmethod
    def forward(ctx: Any, head: Head, cells: Cells, owner_T: Tensor | None, hidden_TM: Tensor, *pair: Tensor) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        unembedding = _unembedding(head, cells, owner_T, hidden_TM, pair)
        found_C = hidden_TM.new_zeros(len(cells.targets_C))
        sums, means = [], []
        for start, stop in (*head.chunks(0, cells.live), *head.chunks(cells.live, len(hidden_TM))):
            products_NV = unembedding.products(start, stop)
            # Every cell looks at every chunk: which cells belong to it is no size, so a recorded pass serves them all.
            place_C = (cells.places_C - start).clamp(0, stop - start - 1)
            here_C = (cells.places_C >= start) & (cells.places_C < stop)
            found_C = torch.where(here_C, products_NV[place_C, cells.targets_C], found_C)
            powers_NV, sum_N1, largest_N1 = head.powers(products_NV)
            sums.append(largest_N1 + sum_N1.log())
            if wanted and stop <= cells.live:
                means.append(unembedding.mean(powers_NV, start, stop).div_(sum_N1))
        logits_C, slopes_C = head.bent(found_C.float())
        ctx.head, ctx.cells, ctx.has_means = head, cells, bool(means)
        ctx.save_for_backward(hidden_TM, slopes_C, torch.cat(means) if means else slopes_C, owner_T, *pair)
        return logits_C - torch.cat(sums)[cells.places_C, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        head, cells = ctx.head, ctx.cells
        hidden_TM, slopes_C, means_NX, owner_T, *pair = ctx.saved_tensors
        grad_TM = torch.zeros_like(hidden_TM)
        if not ctx.has_means:
            return None, None, None, grad_TM, *map(torch.zeros_like, pair)
        unembedding = _unembedding(head, cells, owner_T, hidden_TM, pair)
        live_C = cells.places_C[: cells.reach] < cells.live
        # What is added for cells of other rows is zero. It goes to many rows: on one, the additions would queue up.
        places_C, targets_C = cells.places_C[: cells.reach] % cells.live, cells.targets_C[: cells.reach]
        grad_C1 = torch.where(live_C, grads[0][: cells.reach], 0.0)[:, None]
        given_C1 = torch.where(live_C, grads[0][: cells.reach] * slopes_C[: cells.reach], 0.0)[:, None]
        # What the softmax takes from all logits of a row, by their probability: the sum over the row's cells.
        taken_N1 = grad_C1.new_zeros(cells.live, 1).index_add_(0, places_C, grad_C1 / head.temperature)
        found_NX = (means_NX * -taken_N1).index_add_(0, places_C, unembedding.rows(places_C, targets_C) * given_C1)
        if not pair:
            grad_TM[: cells.live] = found_NX
            return None, None, None, grad_TM
        grad_NM, *of_pair = unembedding.back(found_NX, taken_N1, places_C, targets_C, given_C1)
        grad_TM[: cells.live] = grad_NM
        return None, None, None, grad_TM, *of_pair


def _unembedding(
    head: Head, cells: Cells, owner_T: Tensor | None, hidden_TM: Tensor, pair: Sequence[Tensor]
) -> _Unembedding | _OwnedUnembedding:
    if owner_T is None:
        return _Unembedding(head, hidden_TM, pair)
    return _OwnedUnembedding(head, cells, owner_T, hidden_TM, pair)
