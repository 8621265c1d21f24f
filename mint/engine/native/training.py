"""`NativeTraining`: log-probs of a micro-batch and their gradients in native code, float32 on a CPU.

What `BaseModel.hidden_of_tree` and `target_logprobs` do in torch, which stay the reference. One thread; several passes
may be under way at once.

Shapes: C cells (see `mint.engine.logprobs.Cells`), S the same in the order of the targets, O outputs and I inputs of a
projection, R ranks of its adapted linears together.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mint.engine.fused import Projection, joined
from mint.engine.lora import Adapter
from mint.engine.native import structures
from mint.engine.native.structures import address
from mint.engine.native.weights import PackedLowRank, PackedWeights

if TYPE_CHECKING:
    from mint.engine.batch import Batch


class NativeTraining:
    def __init__(self, weights: PackedWeights) -> None:
        self.weights, self.functions = weights, weights.functions
        self._layers = weights.layers()
        self._decoder = weights.decoder(self._layers, block_size=0)
        self._memory: deque[_Memory] = deque()  # one for each pass that was under way at once

    def logprobs(self, adapter: Adapter | None, batch: Batch, temperature: float, backward: bool, lean: bool) -> Tensor:
        """Of every target, [S]; differentiable in the adapter's parameters if there is to be a backward pass."""
        run = _Pass(self, adapter, batch, temperature, backward and adapter is not None, lean)
        parameters = [] if adapter is None else adapter.parameters()
        return _Logprobs.apply(run, *parameters).index_select(0, batch.targets.back_C)

    def model(self, backward: bool) -> structures.Model:
        rows_VH = address(self.weights.fused.unembedding.weight_OI)
        return structures.Model(ctypes.pointer(self._decoder), self.weights.back() if backward else None, rows_VH)

    def borrow(self, floats: int) -> _Memory:
        """Memory for at least so many."""
        try:
            memory = self._memory.pop()
        except IndexError:
            return _Memory(floats)
        return memory if len(memory.numbers) >= floats else _Memory(floats)

    def give_back(self, memory: _Memory) -> None:
        memory.rest()
        self._memory.append(memory)


class _Memory:
    """A pass's, kept for the next one because new memory costs a tenth of a pass. Meanwhile the system may take its
    pages for others; in large pages where there are any, as all of it is written."""

    def __init__(self, floats: int) -> None:
        self._pages: mmap.mmap | None = None
        if hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_FREE"):
            self._pages = mmap.mmap(-1, floats * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._pages.madvise(mmap.MADV_HUGEPAGE)
            self.numbers = torch.frombuffer(self._pages, dtype=torch.float32)
        else:
            self.numbers = torch.empty(floats)

    def rest(self) -> None:
        """Its numbers may be gone afterwards."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_FREE)


class _Pass:
    """One micro-batch through forward and backward."""

    def __init__(
        self,
        training: NativeTraining,
        adapter: Adapter | None,
        batch: Batch,
        temperature: float,
        backward: bool,
        lean: bool,
    ) -> None:
        self._training = training
        self._adapter = None if adapter is None else _TrainedAdapter(training.weights, adapter, backward)
        self._model = training.model(backward)
        tree, cells = batch.tree, batch.targets
        self._held = [np.array(tree.lengths, np.int64), np.array(tree.parents, np.int64)]
        tensors = [batch.tokens_T, batch.positions_T, cells.order_T, cells.places_C, cells.targets_C]
        tokens, positions, order, places, targets = (self._hold(tensor) for tensor in tensors)
        lengths, parents = (address(numbers) for numbers in self._held[:2])
        self._cells = len(cells.targets_C)
        self._batch = structures.MicroBatch(
            rows=len(batch.tokens_T),
            tokens=tokens,
            positions=positions,
            num_nodes=len(tree.lengths),
            lengths=lengths,
            parents=parents,
            num_cells=self._cells,
            live=cells.live,
            order=order,
            places=places,
            targets=targets,
            temperature=temperature,
            adapter=None if self._adapter is None else self._adapter.parts,
            keep=backward,
            lean=lean,
        )
        self._memory: _Memory | None = None

    def forward(self) -> Tensor:
        """[C]"""
        functions, keep = self._training.functions, bool(self._batch.keep)
        self._memory = self._training.borrow(functions.mint_training_memory(self._model, self._batch))
        self._batch.memory = address(self._memory.numbers)
        found_C = torch.empty(self._cells)
        functions.mint_training_forward(self._model, self._batch, address(found_C))
        if not keep:
            self._end()
        return found_C

    def backward(self, grad_C: Tensor) -> list[Tensor]:
        """Those of the adapter's parameters, in their order."""
        assert self._adapter is not None
        self._training.functions.mint_training_backward(self._model, self._batch, address(grad_C.contiguous()))
        self._end()
        return self._adapter.gradients()

    def _end(self) -> None:
        assert self._memory is not None
        self._training.give_back(self._memory)
        self._memory = None

    def _hold(self, tensor: Tensor) -> int | None:
        self._held.append(tensor.contiguous().numpy())
        return address(self._held[-1])


class _TrainedAdapter:
    """The adapter's part of every projection as it is now: `parts`, what they point to, and the gradients."""

    def __init__(self, weights: PackedWeights, adapter: Adapter, backward: bool) -> None:
        self._adapter = adapter
        self.parts = (structures.TrainedLowRank * len(weights.projections))()
        self._trained: list[_TrainedProjection] = []
        for number, projection in enumerate(weights.projections):
            if (pair := joined(adapter, projection)) is not None:
                self._trained.append(_TrainedProjection(weights, adapter, projection, *pair, backward=backward))
                self.parts[number] = self._trained[-1].structure

    def gradients(self) -> list[Tensor]:
        by_path = {path: pair for trained in self._trained for path, pair in trained.gradients(self._adapter.scale)}
        return [half for path in self._adapter.weights for half in by_path[path]]


class _TrainedProjection:
    def __init__(
        self,
        weights: PackedWeights,
        adapter: Adapter,
        projection: Projection,
        down_RI: Tensor,
        up_RO: Tensor,
        backward: bool,
    ) -> None:
        (rank, inputs), outputs = down_RI.shape, up_RO.shape[1]
        starts = np.cumsum([0, *projection.sizes])
        spans = zip(projection.paths, starts, projection.sizes, strict=False)
        self._spans = [(path, int(first), size) for path, first, size in spans if path in adapter.weights]
        self._rank = adapter.config.rank
        self._packed = PackedLowRank(weights.functions, down_RI, up_RO)
        self.structure = structures.TrainedLowRank(forward=self._packed.structure)
        if not backward:
            return
        parts = np.array([(first, size) for _, first, size in self._spans], np.int64)
        back_up = weights.room(self._rank, int(parts[:, 1].sum()))
        back_down = weights.room(inputs, rank)
        weights.functions.mint_pack_low_rank_back(
            address(down_RI), address(up_RO), rank, inputs, outputs, address(parts), len(parts),
            address(back_up), address(back_down),
        )  # fmt: skip
        self._grad_down, self._grad_up = torch.zeros(rank, inputs), torch.zeros(rank, outputs)
        self.structure.back_up, self.structure.back_down = address(back_up), address(back_down)
        self.structure.parts, self.structure.num_parts = address(parts), len(parts)
        self.structure.grad_down, self.structure.grad_up = address(self._grad_down), address(self._grad_up)
        self._held = (parts, back_up, back_down)

    def gradients(self, scale: float) -> list[tuple[str, tuple[Tensor, Tensor]]]:
        """Of A and B of each linear, by its path."""
        found = []
        for place, (path, first, size) in enumerate(self._spans):
            rows = slice(place * self._rank, (place + 1) * self._rank)
            found.append((path, (self._grad_down[rows], self._grad_up[rows, first : first + size].T * scale)))
        return found


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Pass, *parameters: Tensor) -> Tensor:
        ctx.run = run
        return run.forward()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.run.backward(grads[0])
