"""`NativeTraining`: log-probs of a micro-batch and their gradients in native code, float32 on a CPU.

What `BaseModel.hidden_of_tree` and `target_logprobs` do in torch, which stay the reference. Several passes may be under
way at once, and several threads share one; neither decides a bit.

Shapes: C cells (see `mint.engine.logprobs.Cells`), S the same in the order of the targets, P parameters of the adapter.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import Adapter
from mint.engine.native import structures
from mint.engine.native.structures import address
from mint.engine.native.weights import AdapterMatrices, PackedWeights

if TYPE_CHECKING:
    from mint.engine.batch import Batch


class NativeTraining:
    def __init__(self, weights: PackedWeights) -> None:
        self.weights, self.functions = weights, weights.functions
        self._layers = weights.layers()
        self._decoder = weights.decoder(self._layers, block_size=0)
        self._lock = threading.Lock()
        self._back: Any = None
        self._memory: deque[_Memory] = deque()  # one for each pass that was under way at once

    def forward(
        self, adapter: Adapter | None, batch: Batch, temperature: float, backward: bool, lean: bool, threads: int
    ) -> NativePass:
        """`backward`: its gradients will be asked for."""
        return NativePass(self, adapter, batch, temperature, backward and adapter is not None, lean, threads)

    def model(self, backward: bool) -> structures.Model:
        if backward:
            with self._lock:  # made when it is first wanted
                self._back = self._back or self.weights.back()
        rows_VH = address(self.weights.fused.unembedding.weight_OI)
        return structures.Model(ctypes.pointer(self._decoder), self._back, rows_VH)

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


class NativePass:
    """One micro-batch, forward, and back if it is asked to."""

    def __init__(
        self,
        training: NativeTraining,
        adapter: Adapter | None,
        batch: Batch,
        temperature: float,
        backward: bool,
        lean: bool,
        threads: int,
    ) -> None:
        self._training, self._model = training, training.model(backward)
        self._adapter = None if adapter is None else AdapterMatrices(training.weights, adapter)
        if backward and adapter is not None and self._adapter is not None:
            assert self._adapter.parameters == len(adapter.values_P), (
                "there are no gradients of linears that the model does not have"
            )
        tree, cells = batch.tree, batch.targets
        self._held = [np.array(tree.lengths, np.int64), np.array(tree.parents, np.int64)]
        tensors = [batch.tokens_T, batch.positions_T, cells.order_T, cells.places_C, cells.targets_C]
        tokens, positions, order, places, targets = (self._hold(tensor) for tensor in tensors)
        lengths, parents = (address(numbers) for numbers in self._held[:2])
        self._batch = structures.MicroBatch(
            rows=len(batch.tokens_T),
            tokens=tokens,
            positions=positions,
            num_nodes=len(tree.lengths),
            lengths=lengths,
            parents=parents,
            num_cells=len(cells.targets_C),
            live=cells.live,
            order=order,
            places=places,
            targets=targets,
            temperature=temperature,
            adapter=None if self._adapter is None else ctypes.pointer(self._adapter.structure),
            keep=backward,
            lean=lean,
            threads=threads,
        )
        self._memory: _Memory | None = None
        self._logprobs_C = self._forward().requires_grad_(backward)
        self.logprobs_S = self._logprobs_C.index_select(0, cells.back_C)
        """Of every target; what is computed from them is differentiable as far as here."""

    def gradients(self, total: Tensor, into: Tensor | None = None) -> Tensor:
        """Of a number computed from the log-probs, in the adapter's parameters, one after the other, [1, P]."""
        assert self._adapter is not None and self._memory is not None, "announced, and asked for once"
        assert into is None, "for recorded passes"
        (grad_C,) = torch.autograd.grad(total, [self._logprobs_C], materialize_grads=True, allow_unused=True)
        grad_C = grad_C.contiguous()
        gradients_1P = torch.empty(1, self._adapter.parameters)
        self._training.functions.mint_training_backward(
            self._model, self._batch, address(grad_C), address(gradients_1P)
        )
        self._end()
        return gradients_1P

    def _forward(self) -> Tensor:
        functions = self._training.functions
        self._memory = self._training.borrow(functions.mint_training_memory(self._model, self._batch))
        self._batch.memory = address(self._memory.numbers)
        found_C = torch.empty(self._batch.num_cells)
        functions.mint_training_forward(self._model, self._batch, address(found_C))
        if not self._batch.keep:
            self._end()
        return found_C

    def _end(self) -> None:
        assert self._memory is not None
        self._training.give_back(self._memory)
        self._memory = None

    def _hold(self, tensor: Tensor) -> int | None:
        self._held.append(tensor.contiguous().numpy())
        return address(self._held[-1])
