"""Training passes as recorded CUDA graphs: a pass is some thousand kernels, and launching them one by one takes longer
than computing a small micro-batch.

One recording serves every micro-batch of a size (filled batches come in few sizes, see `mint.engine.batch`) and every
adapter of a shape: what a pass reads is copied into the tensors it was recorded with. A size is run as it is the first
time it is met and recorded the second time, which costs about as long as launching the pass once. All recordings share
the memory of the largest; there are so many at most, the least recently used goes first, and all of them go when memory
runs out. Where a recording does not fit, or recording fails, passes are run as they are.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from mint.engine import memory
from mint.engine.batch import Batch
from mint.engine.device import wait_for_gpu
from mint.engine.lora import Adapter
from mint.engine.model import BaseModel
from mint.engine.stack import Stack
from mint.engine.training_pass import Pass, Work, compute

MOST_RECORDINGS = 48
MOST_SIZES_REMEMBERED = 512
# Of a GPU's free memory, what recordings may take for themselves.
SHARE_OF_FREE = 0.5
# What a pass needs beside the activations it keeps: logits of a chunk and their exponentials, and what is left over
# between tensors.
BESIDE_BYTES, BESIDE_SHARE = 2 * 2**30, 0.15

log = logging.getLogger(__name__)


class Recording(Protocol):
    bytes: int
    """Memory it took beyond what the pool had."""

    def __call__(self) -> Pass:
        """What the recorded function gives for what its tensors hold now; overwritten by the next call."""
        ...


Recorder = Callable[[Callable[[], Pass], Any], Recording]
"""(function, memory pool) -> its recording"""


class CudaRecording:
    def __init__(self, function: Callable[[], Pass], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may copy and allocate meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved()
            self._found = function()
            self.bytes = torch.cuda.memory_reserved() - before

    def __call__(self) -> Pass:
        self._graph.replay()
        return self._found


class _Slot:
    """What recordings for one number of adapters of one shape compute with, and where they all leave the gradients."""

    def __init__(self, like: Adapter, count: int, dtype: torch.dtype) -> None:
        self.adapter = like.twin() if count == 1 else Stack(like, count, dtype)
        self.gradients_NP = like.values_P.new_empty(count, len(like.values_P))

    def load(self, adapters: Sequence[Adapter]) -> None:
        if isinstance(self.adapter, Stack):
            self.adapter.load(adapters)
        else:
            self.adapter.values_P.copy_(adapters[0].values_P)


class _Inputs:
    """What a recorded pass reads, in one piece of memory: one copy brings in another batch of the same size."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        tensors = batch.tensors()
        starts = [0, *accumulate(_aligned(tensor) for tensor in tensors)]
        self._places = [slice(start, start + tensor.nbytes) for start, tensor in zip(starts, tensors, strict=False)]
        self._memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        parts = zip(self._places, tensors, strict=True)
        self.batch = batch.with_tensors([self._memory[at].view(t.dtype).view(t.shape) for at, t in parts])

    def load(self, batch: Batch) -> None:
        # From pinned memory, or the copy would wait for the pass before this one.
        pinned = self._memory.is_cuda
        staged = torch.empty(self._memory.shape, dtype=torch.uint8, pin_memory=pinned)
        bytes_of = staged.numpy()
        for place, tensor in zip(self._places, batch.tensors(), strict=True):
            bytes_of[place] = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
        self._memory.copy_(staged, non_blocking=True)


def _aligned(tensor: Tensor) -> int:
    """Bytes, up to a multiple of what kernels read at once."""
    return -(-tensor.nbytes // 16) * 16


class PassGraphs:
    def __init__(self, model: BaseModel, recorder: Recorder) -> None:
        self.device = model.device
        self.bytes = 0
        """Of the memory the recordings share."""
        self._share = SHARE_OF_FREE
        self._model = model
        self._recorder = recorder
        self._usable = model.trains_recorded
        self._pool: Any = None
        self._recorded: OrderedDict[Hashable, tuple[Recording, _Inputs, _Slot | None]] = OrderedDict()
        self._kept: OrderedDict[Hashable, int] = OrderedDict()
        """By size met once: what its pass kept for the backward pass."""
        self._slots: WeakValueDictionary[Hashable, _Slot] = WeakValueDictionary()
        self._shapes: dict[Hashable, int] = {}
        """A short name for each shape of adapters."""
        self._shape_of: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._weights_at: tuple[int, ...] = ()
        memory.register(self)

    def __call__(self, adapters: Sequence[Adapter], batch: Batch, work: Work) -> Pass:
        """`adapters`: of one shape, one for each call of the batch, which is on the CPU; none: the base model. `kept`
        is 0 for a pass that was recorded."""
        if not self._usable:
            return self._computed(adapters, batch, work)
        self._forget_if_weights_moved()
        shape = self.shape(adapters[0]) if adapters else None
        key = (batch.size, shape, work)
        if key not in self._recorded and self._fits(self._kept.get(key)):
            self._record(key, shape, adapters, batch, work)
        if key in self._recorded:
            return self._replay(key, adapters, batch)
        found = self._computed(adapters, batch, work)
        self._kept[key] = found.kept
        if len(self._kept) > MOST_SIZES_REMEMBERED:
            self._kept.popitem(last=False)
        return found

    def _computed(self, adapters: Sequence[Adapter], batch: Batch, work: Work) -> Pass:
        if len(adapters) < 2:
            return compute(self._model, adapters[0] if adapters else None, batch.to(self.device), work)
        stack = Stack(adapters[0], batch.most_calls, self._model.dtype)
        stack.load(adapters)
        found = compute(self._model, stack, batch.to(self.device), work)
        # Copies, or the memory of all would stay as long as one of them is wanted.
        return found._replace(gradients=[gradients_P.clone() for gradients_P in found.gradients[: len(adapters)]])

    def give_back(self) -> bool:
        """For want of memory: forgets all recordings, and later ones get half as much. Whether there were any."""
        had = bool(self._recorded)
        self._share /= 2
        self._forget()
        return had

    def _forget(self) -> None:
        wait_for_gpu()  # it may be at one of them
        self._recorded.clear()
        self._kept.clear()
        self._pool = None  # it went with the last of them
        self.bytes = 0

    def _fits(self, kept: int | None) -> bool:
        if kept is None:
            return False
        needed = int(kept * (1 + BESIDE_SHARE)) + BESIDE_BYTES
        return needed <= self.bytes + self._share * memory.free_memory(self.device)

    def _record(self, key: Hashable, shape: Hashable, adapters: Sequence[Adapter], batch: Batch, work: Work) -> None:
        inputs = _Inputs(batch, self.device)
        inputs.load(batch)
        slot: _Slot | None = None
        if adapters:
            place = shape, batch.most_calls
            slot = self._slots.get(place)
            if slot is None:
                slot = self._slots[place] = _Slot(adapters[0], batch.most_calls, self._model.dtype)

        def function() -> Pass:
            adapter, into = (None, None) if slot is None else (slot.adapter, slot.gradients_NP)
            return compute(self._model, adapter, inputs.batch, work, into)._replace(kept=0)

        if self._pool is None and self.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        try:
            recording = self._recorder(function, self._pool)
        except RuntimeError as error:
            log.warning("a training pass could not be recorded; training goes on without", exc_info=error)
            self._usable = False
            self._forget()
            return
        self.bytes += recording.bytes
        self._recorded[key] = recording, inputs, slot
        if len(self._recorded) > MOST_RECORDINGS:
            wait_for_gpu()
            self._recorded.popitem(last=False)

    def _replay(self, key: Hashable, adapters: Sequence[Adapter], batch: Batch) -> Pass:
        self._recorded.move_to_end(key)
        recording, inputs, slot = self._recorded[key]
        inputs.load(batch)
        if slot is not None:
            slot.load(adapters)
        found = recording()
        return found._replace(
            logprobs_S=found.logprobs_S.clone(),
            p_C=found.p_C.clone(),
            loss_C=found.loss_C.clone(),
            figures=found.figures.clone(),
            gradients=[gradients_P.clone() for gradients_P in found.gradients[: len(batch.counts)]],
        )

    def _forget_if_weights_moved(self) -> None:
        """A recording knows the weights by their address, and the sampler may have laid them out anew."""
        at = tuple(linear.weight.data_ptr() for linear in self._model.linears.values())
        if at != self._weights_at:
            self._forget()
            self._weights_at = at

    def shape(self, adapter: Adapter) -> Hashable:
        """What adapters that share a recording, or a pass, have in common."""
        if adapter not in self._shape_of:
            shapes = tuple((path, a.shape, b.shape) for path, (a, b) in adapter.weights.items())
            self._shape_of[adapter] = self._shapes.setdefault(shapes, len(self._shapes))
        return adapter.scale, self._shape_of[adapter]
