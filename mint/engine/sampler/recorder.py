"""Passes as recorded CUDA graphs, by size: one that was met often enough is recorded, and replayed from then on.

A graph holds addresses: of the buffers it was recorded over, which must stay in place, of the adapters' tables, and of
the keys and values. When one of the latter moves, all are void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from mint.engine.kernels.low_rank import Tables
from mint.engine.sampler.paged import BlockStore

# Each keeps its kernels' arguments; sizes are rounded, so few are in use at a time.
_MOST = 128


class Recorder:
    def __init__(self, store: BlockStore, after: int) -> None:
        """`after`: how often a size is run as it is before it is worth the time to record it."""
        self._store = store
        self._after = after
        self._met: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._recorded_with: tuple[Tables, int] | None = None
        self._pool: Any = None

    def check(self, tables: Tables) -> None:
        """Before a pass that uses these tables."""
        if self._recorded_with != (tables, self._store.keys[0].data_ptr()):
            self.forget()
            self._recorded_with = tables, self._store.keys[0].data_ptr()

    def run(self, size: Hashable, forward: Callable[[], Tensor]) -> Tensor:
        """What `forward` returns, which the next pass of any size may overwrite."""
        if size not in self._graphs:
            self._met[size] += 1
            if self._met[size] <= self._after or self._store.keys[0].device.type != "cuda":
                return forward()
            self._graphs[size] = self._record(forward)
        graph, out = self._graphs[size]
        graph.replay()
        return out

    def forget(self) -> None:
        if self._graphs:
            torch.cuda.synchronize()  # one may still be running
        self._graphs.clear()
        self._met.clear()  # each is run once more before it is recorded: what it needs is compiled then
        self._pool = None  # the memory went with the last of them

    def _record(self, forward: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if len(self._graphs) >= _MOST:
            self.forget()
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # What other threads do meanwhile, a copy to the host for one, is no part of it.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = forward()
        return graph, out
