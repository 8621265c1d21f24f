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

from mint.engine.lora import UNEMBEDDING, Adapter
from mint.engine.model import BaseModel

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
        order_T = np.concatenate([np.flatnonzero(live_T), np.flatnonzero(~live_T)])
        places_C = _inverse(order_T)[rows_C]
        order_C = np.argsort(places_C, kind="stable")
        places_C, live = places_C[order_C], int(live_T.sum())
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
    model: BaseModel, adapter: Adapter | None, hidden_TM: Tensor, cells: Cells, temperature: float = 1.0
) -> Tensor:
    """log softmax(logits / temperature) of each cell, [C] in float32; differentiable in the hidden states of live rows
    and in the unembedding's adapter."""
    pair = adapter.weights.get(UNEMBEDDING, ()) if adapter is not None else ()
    head = Head.of(model, adapter, temperature)
    ordered_TM = hidden_TM.index_select(0, cells.order_T)
    return _TargetLogprobs.apply(head, cells, ordered_TM, *pair).index_select(0, cells.back_C)


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
    def of(cls, model: BaseModel, adapter: Adapter | None, temperature: float) -> Head:
        return cls(model, 0.0 if adapter is None else adapter.scale, temperature)

    def logits(self, hidden_NM: Tensor, pair: Sequence[Tensor]) -> Tensor:
        """[N, V] in float32, as the softmax sees them; differentiable in the hidden states and the pair."""
        products_NV = self.products(hidden_NM, self.weight)
        if pair:
            down, up = (weight.to(hidden_NM.dtype) for weight in pair)
            products_NV = products_NV + (hidden_NM @ down.T * self.scale) @ up.T
        return self.bent(products_NV.float())[0]

    def widened(self, hidden_TM: Tensor, pair: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """[h, scale * A h] and [W, B]: their product is that of the adapted unembedding."""
        if not pair:
            return hidden_TM, self.weight
        down, up = (weight.detach().to(hidden_TM.dtype) for weight in pair)
        return torch.cat([hidden_TM, hidden_TM @ down.T * self.scale], 1), torch.cat([self.weight, up], 1)

    def products(self, wide_NX: Tensor, weight_VX: Tensor) -> Tensor:
        return F.linear(wide_NX, weight_VX, self.bias)

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


class _TargetLogprobs(torch.autograd.Function):
    """Of hidden states in the order of the cells. Saves, for live rows, the mean of [W, B] under the softmax."""

    @staticmethod
    def forward(ctx: Any, head: Head, cells: Cells, hidden_TM: Tensor, *pair: Tensor) -> Tensor:
        live = cells.live if any(ctx.needs_input_grad) else 0
        wide_TX, weight_VX = head.widened(hidden_TM, pair)
        found_C = wide_TX.new_zeros(len(cells.targets_C))
        sums, means = [], [wide_TX.new_empty(0, weight_VX.shape[1])]
        for start, stop in (*head.chunks(0, live), *head.chunks(live, len(hidden_TM))):
            products_NV = head.products(wide_TX[start:stop], weight_VX)
            # Every cell looks at every chunk: which cells belong to it is no size, so a recorded pass serves them all.
            place_C = (cells.places_C - start).clamp(0, stop - start - 1)
            here_C = (cells.places_C >= start) & (cells.places_C < stop)
            found_C = torch.where(here_C, products_NV[place_C, cells.targets_C], found_C)
            powers_NV, sum_N1, largest_N1 = head.powers(products_NV)
            sums.append(largest_N1 + sum_N1.log())
            if stop <= live:
                means.append((powers_NV @ weight_VX).div_(sum_N1))
        logits_C, slopes_C = head.bent(found_C.float())
        ctx.head, ctx.cells = head, cells
        ctx.save_for_backward(hidden_TM, slopes_C, torch.cat(means), *pair)
        return logits_C - torch.cat(sums)[cells.places_C, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        head, cells = ctx.head, ctx.cells
        hidden_TM, slopes_C, means_NX, *pair = ctx.saved_tensors
        wide_TX, weight_VX = head.widened(hidden_TM, pair)
        count, width = cells.reach if cells.live else 0, hidden_TM.shape[1]
        live_C = cells.places_C[:count] < cells.live
        # What is added for cells of other rows is zero. It goes to many rows: on one, the additions would queue up.
        places_C, targets_C = cells.places_C[:count] % max(1, cells.live), cells.targets_C[:count]
        grad_C1 = torch.where(live_C, grads[0][:count], 0.0)[:, None]
        given_C1 = grad_C1 * slopes_C[:count, None]
        # What the softmax takes from all logits of a row, by their probability: the sum over the row's cells.
        taken_N1 = grad_C1.new_zeros(cells.live, 1).index_add_(0, places_C, grad_C1 / head.temperature)
        found_NX = (means_NX * -taken_N1).index_add_(0, places_C, weight_VX[targets_C] * given_C1)
        found_NM, found_NR = found_NX[:, :width], found_NX[:, width:] * head.scale
        grad_TM = torch.zeros_like(hidden_TM)
        if not pair:
            grad_TM[: cells.live] = found_NM
            return None, None, grad_TM
        down, up = pair
        grad_TM[: cells.live] = torch.addmm(found_NM, found_NR, down.float())
        inner_NR = wide_TX[: cells.live, width:].float()
        grad_up = torch.zeros_like(up).index_add_(0, targets_C, inner_NR[places_C] * given_C1)
        for start, stop in head.chunks(0, cells.live):
            powers_NV, sum_N1, _ = head.powers(head.products(wide_TX[start:stop], weight_VX))
            taken_NR = inner_NR[start:stop] * (taken_N1[start:stop] / sum_N1)
            grad_up.sub_(powers_NV.T @ taken_NR.to(powers_NV.dtype))
        return None, None, grad_TM, found_NR.T @ hidden_TM[: cells.live].float(), grad_up
