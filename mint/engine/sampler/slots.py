"""Which adapters the kernels know, by line of a table of addresses, ranks and scales.

A new policy is samplable when its addresses are written, and sequences of older ones go on beside it. A is read where
it lies, B from a turned copy. Line 0 is the base model. Where all rows of a pass have one adapter, its A stands below
the base weights as well, in the room left there: x A' is then part of the matrix product. The unembedding has its B
beside the weights instead, and all that it adds is part of the product.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mint.engine.fused import ROOM, FusedDecoder, Projection
from mint.engine.kernels.low_rank import TILE, Tables
from mint.engine.lora import UNEMBEDDING, Adapter
from mint.engine.sampler.transfer import put

_FIRST_LINES = 256


class AdapterSlots:
    def __init__(self, fused: FusedDecoder) -> None:
        self._device, self._dtype = fused.embedding.device, fused.embedding.dtype
        self._numbers: dict[str, int] = {}
        self._projections = list(chain.from_iterable(layer.projections for layer in fused.layers))
        self._unembedding = fused.unembedding
        for projection in (*self._projections, self._unembedding):
            self._count(projection)
        self.tables = Tables(_FIRST_LINES, len(self._numbers), TILE, self._device)
        """Another object when it had to grow: whatever was recorded with the old one is void."""
        self._lines: dict[Adapter, int] = {}
        self._held: dict[int, list[Tensor]] = {}  # what the addresses of a line point to
        self._free = list(range(_FIRST_LINES - 1, 0, -1))
        self._has_room = self._unembedding.wide_OX is not None
        self._standing: Adapter | None = None  # whose matrices stand there
        self._rooms: dict[int, dict[str, Tensor]] = {}  # by rank in whole steps: the room of each linear

    def first_linear(self, projection: Projection) -> int:
        return self._numbers[projection.paths[0]]

    def lines(self, adapters: Iterable[Adapter | None]) -> dict[Adapter | None, int]:
        """The line of each, written now if need be. Lines of others may be given up for it."""
        wanted = {adapter for adapter in adapters if adapter is not None}
        self._make_room(wanted)
        for adapter in wanted:
            if adapter not in self._lines:
                self._lines[adapter] = self._free.pop()
                self._write(adapter, self._lines[adapter])
        return {None: 0} | {adapter: self._lines[adapter] for adapter in wanted}

    def join(self, adapters: Iterable[Adapter | None]) -> int | None:
        """If all rows of a pass have one adapter, puts it into the room at the weights; the rank, in whole steps, 0 for
        the base model. None if there are several, the base model among them (what it multiplies by zero might be no
        number), or no room for it."""
        wanted = set(adapters)
        if len(wanted) > 1 or not self._has_room:
            return None
        adapter = wanted.pop()
        if adapter is None:
            return 0
        rank = -(-adapter.config.rank // TILE) * TILE
        if rank > ROOM:
            return None
        if self._standing is not adapter:
            self._stand(adapter, rank)
        return rank

    @torch.no_grad()
    def _stand(self, adapter: Adapter, rank: int) -> None:
        rooms = self._rooms.get(rank) or self._rooms.setdefault(rank, self._rooms_of(rank))
        held, below = adapter.config.rank, [path for path in adapter.weights if path != UNEMBEDDING]
        targets, sources = [rooms[path] for path in below], [adapter.weights[path][0] for path in below]
        if below:
            if held < rank:  # what another left there must not be multiplied, not even by zero
                torch._foreach_zero_(targets)
                targets = [target[:held] for target in targets]
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if UNEMBEDDING in adapter.weights:
            assert self._unembedding.wide_OX is not None
            beside_OR = self._unembedding.wide_OX[:, self._unembedding.weight_OI.shape[1] :][:, :rank]
            beside_OR[:, held:] = 0
            beside_OR[:, :held] = adapter.weights[UNEMBEDDING][1]
        self._standing = adapter

    def _rooms_of(self, rank: int) -> dict[str, Tensor]:
        rooms: dict[str, Tensor] = {}
        for projection in self._projections:
            assert projection.roomy_OI is not None
            free = projection.roomy_OI[sum(projection.sizes) :][: rank * len(projection.paths)]
            rooms |= zip(projection.paths, free.split(rank), strict=True)
        return rooms

    def forget(self, adapter: Adapter) -> None:
        """For one that runs on it is found again at its next step."""
        if self._standing is adapter:
            self._standing = None
        if (line := self._lines.pop(adapter, None)) is not None:
            del self._held[line]
            self._free.append(line)

    def _count(self, projection: Projection) -> None:
        for path in projection.paths:
            self._numbers[path] = len(self._numbers)

    def _make_room(self, wanted: set[Adapter]) -> None:
        rank = max((adapter.config.rank for adapter in wanted), default=0)
        rank_cap = max(self.tables.rank_cap, -(-rank // TILE) * TILE)
        lines = self.tables.lines
        if len(wanted - self._lines.keys()) > len(self._free):
            for adapter in self._lines.keys() - wanted:
                self.forget(adapter)
            while len(wanted) >= lines:
                lines *= 2
        if lines > self.tables.lines or rank_cap > self.tables.rank_cap:
            self.tables = Tables(lines, len(self._numbers), rank_cap, self._device)
            self._lines.clear()
            self._held.clear()
            self._free = list(range(lines - 1, 0, -1))

    def _write(self, adapter: Adapter, line: int) -> None:
        a, b, rank = ([0] * len(self._numbers) for _ in range(3))
        held = self._held[line] = []
        turned = _turned([up for _, up in adapter.weights.values()])
        for (path, (down, _)), up in zip(adapter.weights.items(), turned, strict=True):
            number = self._numbers[path]
            tensors = [_readable(weight, self._dtype) for weight in (down, up)]
            held += tensors
            a[number], b[number] = (tensor.data_ptr() for tensor in tensors)
            rank[number] = len(down)
        tables = self.tables
        put(np.array(a), tables.a[line])
        put(np.array(b), tables.b[line])
        put(np.array(rank, dtype=np.int32), tables.rank[line])
        tables.scale[line] = adapter.scale


def adapts_unembedding(adapters: Iterable[Adapter | None]) -> bool:
    return any(adapter is not None and UNEMBEDDING in adapter.weights for adapter in adapters)


def _turned(ups: list[Tensor]) -> list[Tensor]:
    """Each turned around and written out; those of one shape together, because every launch costs the host more than
    it costs the device."""
    alike: dict[torch.Size, list[int]] = {}
    for n, up in enumerate(ups):
        alike.setdefault(up.shape, []).append(n)
    turned: dict[int, Tensor] = {}
    for places in alike.values():
        together = torch.stack([ups[n].detach() for n in places]).transpose(1, 2).contiguous()
        turned |= zip(places, together.unbind(), strict=True)
    return [turned[n] for n in range(len(ups))]


def _readable(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The kernels read rows of 16 aligned bytes."""
    if weight.dtype != dtype or not weight.is_contiguous():
        weight = weight.detach().to(dtype).contiguous()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()
